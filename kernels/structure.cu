// structure — the rows of a graph from its edges, and the tiles of those that are long.
// Maths     rowptr[i] = the number of keys below i, of sorted keys; tiles as in common/rows.cuh
// Shapes    src, dst, keys, order [E]  rowptr [N + 1]  tiles [T, 4]  facts [6]  counts [chunks]
//           index_t is the type of the user's arrays; those of the structure are int
// Mapping   a thread an edge, or a row; a block takes a chunk of rows, one after another
// Traffic   what is read and written once, in order, but what an order gathers: 32 bytes an edge
// Numerics  exact; atomics set bits, count and take maxima, whose order does not matter
// Limits    nodes and edges below 2^31. Values of the user's arrays are compared and stored; nothing
//           is read or written at a place that one of them tells
#include "common/scalar.cuh"

// What is found out on the way, for one read-back.
enum Fact { OUTSIDE, UNSORTED, OTHER_ROWS, OTHER_ENDS, LONGEST, TILES };

DEVICE long long thread_of_launch() { return (long long)blockIdx.x * THREADS + threadIdx.x; }
DEVICE long long threads_of_launch() { return (long long)gridDim.x * THREADS; }

// Called by all threads of a block.
DEVICE void note(long long* facts, Fact fact, bool found) {
  if (__syncthreads_or(found) && threadIdx.x == 0) {
    atomicOr((unsigned long long*)facts + fact, 1ull);
  }
}

DEVICE bool inside(long long value, long long end) { return value >= 0 && value < end; }

// The number of sorted values below one; of others, any number up to `size`.
DEVICE long long count_below(const int* values, long long size, long long value) {
  long long low = 0, high = size;
  while (low < high) {
    const long long middle = (low + high) / 2;
    if (__ldg(values + middle) < value)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// How a row is cut.
struct Cut {
  long long parts, size;  // no parts: the row is whole
  DEVICE_MEMBER Cut(long long degree, long long split, long long most, long long widest) {
    size = split * min((degree + split * most - 1) / (split * most), widest);
    parts = degree > split ? (degree + size - 1) / size : 0;
  }
};

// Copies edges as they are stored, and looks at them; `dst` may be null.
extern "C" __global__ void __launch_bounds__(THREADS)
    structure_read(const index_t* __restrict__ src, const index_t* __restrict__ dst,
                   int* __restrict__ source, int* __restrict__ target,
                   long long* __restrict__ facts, long long num_edges, long long num_src,
                   long long num_dst) {
  bool outside = false, unsorted = false;
  for (long long e = thread_of_launch(); e < num_edges; e += threads_of_launch()) {
    const index_t from = __ldg(src + e);
    outside |= !inside(from, num_src);
    source[e] = (int)from;
    if (!dst) continue;
    const index_t to = __ldg(dst + e);
    outside |= !inside(to, num_dst);
    unsorted |= e > 0 && __ldg(dst + e - 1) > to;
    target[e] = (int)to;
  }
  note(facts, OUTSIDE, outside);
  note(facts, UNSORTED, unsorted);
}

// Writes row pointers: those of keys, or those that are given. `other` are row pointers to compare
// them with, or null; `counts` the tiles of each chunk.
extern "C" __global__ void __launch_bounds__(THREADS)
    structure_rows(const int* __restrict__ keys, const index_t* __restrict__ given,
                   const int* __restrict__ other, int* __restrict__ rowptr,
                   long long* __restrict__ counts, long long* __restrict__ facts,
                   long long num_edges, long long num_rows, long long chunk, long long split,
                   long long most, long long widest) {
  bool outside = false, differs = false;
  long long longest = 0, tiles = 0;
  const long long first = blockIdx.x * chunk, last = min(first + chunk, num_rows + 1);
  for (long long next = first; next < last; next += THREADS) {
    const long long row = next + threadIdx.x;
    auto begin_of = [&](long long i) -> long long {
      if (i > num_rows) return num_edges;
      return given ? (long long)__ldg(given + i) : count_below(keys, num_edges, i);
    };
    const long long begin = begin_of(row);
    long long end = __shfl_down_sync(0xffffffffu, begin, 1);
    if (threadIdx.x % 32 == 31) end = begin_of(row + 1);
    if (row >= last) continue;
    rowptr[row] = (int)begin;
    differs |= other && __ldg(other + row) != begin;
    if (given) {
      outside |= begin < 0 || begin > end || end > num_edges;
      outside |= (row == 0 && begin != 0) || (row == num_rows && begin != num_edges);
    }
    if (outside || row == num_rows) continue;
    longest = max(longest, end - begin);
    tiles += Cut(end - begin, split, most, widest).parts;
  }
  for (int lanes = 16; lanes; lanes /= 2) {
    longest = max(longest, __shfl_xor_sync(0xffffffffu, longest, lanes));
    tiles += __shfl_xor_sync(0xffffffffu, tiles, lanes);
  }
  __shared__ long long longest_of[THREADS / 32], tiles_of[THREADS / 32];
  if (threadIdx.x % 32 == 0) {
    longest_of[threadIdx.x / 32] = longest;
    tiles_of[threadIdx.x / 32] = tiles;
  }
  note(facts, OUTSIDE, outside);  // a barrier, too
  note(facts, OTHER_ROWS, differs);
  if (threadIdx.x) return;
  for (int warp = 1; warp < THREADS / 32; warp++) {
    longest = max(longest, longest_of[warp]);
    tiles += tiles_of[warp];
  }
  counts[blockIdx.x] = tiles;
  atomicMax((unsigned long long*)facts + LONGEST, (unsigned long long)longest);
  if (tiles) atomicAdd((unsigned long long*)facts + TILES, (unsigned long long)tiles);
}

// The sum over the threads of a block that come before this one, and that over all.
DEVICE long long sum_before(long long value, long long& all) {
  __shared__ long long sums[THREADS / 32];
  const int lane = threadIdx.x % 32;
  long long sum = value;
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const long long left = __shfl_up_sync(0xffffffffu, sum, lanes);
    if (lane >= lanes) sum += left;
  }
  __syncthreads();  // the sums of the call before were read
  if (lane == 31) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  long long before = 0;
  all = 0;
  for (int warp = 0; warp < THREADS / 32; warp++) {
    if (warp < threadIdx.x / 32) before += sums[warp];
    all += sums[warp];
  }
  return before + sum - value;
}

// Writes the tiles of the rows that are split, after those of the chunks before; a warp a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    structure_tiles(const int* __restrict__ rowptr, const long long* __restrict__ counts,
                    long long* __restrict__ tiles, long long num_rows, long long chunk,
                    long long split, long long most, long long widest) {
  if (!counts[blockIdx.x]) return;
  long long before = 0, at, all;
  for (int i = threadIdx.x; i < blockIdx.x; i += THREADS) before += counts[i];
  sum_before(before, at);
  const long long first = blockIdx.x * chunk, last = min(first + chunk, num_rows);
  for (long long next = first; next < last; next += THREADS) {
    const long long row = next + threadIdx.x;
    const long long begin = row < last ? rowptr[row] : 0, end = row < last ? rowptr[row + 1] : 0;
    const Cut cut(end - begin, split, most, widest);
    const long long own = at + sum_before(cut.parts, all);
    at += all;
    for (unsigned left = __ballot_sync(0xffffffffu, cut.parts > 0); left; left &= left - 1) {
      const int lane = __ffs(left) - 1;
      const long long parts = __shfl_sync(0xffffffffu, cut.parts, lane);
      const long long size = __shfl_sync(0xffffffffu, cut.size, lane);
      const long long start = __shfl_sync(0xffffffffu, begin, lane);
      const long long stop = __shfl_sync(0xffffffffu, end, lane);
      long long* out = tiles + 4 * __shfl_sync(0xffffffffu, own, lane);
      for (long long part = threadIdx.x % 32; part < parts; part += 32) {
        out[4 * part] = row - threadIdx.x % 32 + lane;
        out[4 * part + 1] = start + part * size;
        out[4 * part + 2] = min(start + part * size + size, stop);
        out[4 * part + 3] = part ? 0 : parts;
      }
    }
  }
}

// Writes the row of each position.
extern "C" __global__ void __launch_bounds__(THREADS)
    structure_targets(const int* __restrict__ rowptr, int* __restrict__ target, long long num_edges,
                      long long num_rows) {
  for (long long k = thread_of_launch(); k < num_edges; k += threads_of_launch())
    target[k] = (int)count_below(rowptr, num_rows + 1, k + 1) - 1;
}

// Puts the ends of edges in an order, and writes that; `other` are ends to compare them with, or
// null.
extern "C" __global__ void __launch_bounds__(THREADS)
    structure_order(const long long* __restrict__ order, const int* __restrict__ ends,
                    const int* __restrict__ other, int* __restrict__ idx, int* __restrict__ perm,
                    long long* __restrict__ facts, long long num_edges) {
  bool differs = false;
  for (long long k = thread_of_launch(); k < num_edges; k += threads_of_launch()) {
    const long long from = __ldg(order + k);
    const int end = __ldg(ends + from);
    differs |= other && __ldg(other + k) != end;
    idx[k] = end;
    perm[k] = (int)from;
  }
  note(facts, OTHER_ENDS, differs);
}
