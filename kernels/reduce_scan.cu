// reduce_fold, reduce_scan — gradients of reduce where rows by target are long: few edges share.
// Maths     dx[j] = sum of the shares of the edges k from j in grad[i] (as reduce_gather)
//           folded = the lowest seven bits of mark, and its sign
// Shapes    x, dx [S, width]  grad, best [N, width]  mark [N, width] (place_t)  folded [N, width] (a
//           byte each; mark itself where it has no more)  place [E] (in the row by target)
//           partial [T, width] (acc_t)  unusual [1] (int)  rowptr [S + 1]  idx [E]  tiles [T, 4]
// Mapping   fold: VEC marks a thread. scan: LANES lanes a row or tile by source, VEC marks a lane,
//           wider rows by blockIdx.y. A lane compares its marks of an edge at once, and then adds
//           what it finds to its own sums
// Traffic   gathers E rows of folded, 8 bytes of idx and place each; 32 bytes of grad, and of mark
//           where it was folded, for each result and for one in 128 of the folded marks
// Numerics  acc_t sums, in an order that the structure and the marks give; tiles merged in order (by
//           spmm_merge); no atomics
// Limits    VEC divides width; an access of marks has 16 bytes at the most; no weights, no COUNTS
//
// `unusual` tells that a share is not finite: see reduce_backward.cu.
#include "common/marks.cuh"
#include "common/rows.cuh"

struct Targets {
  const index_t *idx, *place;  // of each edge by source
  const scalar_t *grad, *best;
  const place_t* mark;
  const signed char* folded;
  int width;

  DEVICE_MEMBER long long at(index_t target, int f) const { return (long long)target * width + f; }
  // Whether a mark is a place, of which its folded bits are known to be those.
  DEVICE_MEMBER bool confirms(long long at, int place) const {
    return sizeof(place_t) == 1 || __ldg(mark + at) == place;
  }
};

typedef Marks<VEC, signed char> Folded;

// Adds the shares of an edge in results that several edges share.
DEVICE void add_shared(acc_t* sum, const Targets& t, const scalar_t* x, long long at,
                       bool* unusual) {
  Folded marks;
  marks.load(t.folded + at);
  for (unsigned set = marks.shared(); set; set &= set - 1) {
    const int v = Folded::number(__ffs(set) - 1);
    const acc_t share = share_of(widen(__ldg(t.grad + at + v)), __ldg(t.mark + at + v));
    *unusual |= !is_finite(share);  // of NaN, which nobody attains, too
    if (attains(widen(__ldg(x + v)), widen(__ldg(t.best + at + v)))) sum[v] += share;
  }
}

template <bool FULL>
DEVICE void add_batch(acc_t* sum, const Targets& t, const scalar_t* x, long long k, long long end,
                      int f, bool* unusual) {
  index_t target[BATCH];
  int place[BATCH];
  unsigned hits[BATCH];
  bool shared[BATCH], any = false;
  scalar_t grad[BATCH];
#pragma unroll
  for (int u = 0; u < BATCH; u++) {
    const bool inside = FULL || k + u < end;
    target[u] = inside ? __ldg(t.idx + k + u) : -1;
    place[u] = inside ? (int)__ldg(t.place + k + u) : 0;
  }
  Folded marks[BATCH];
#pragma unroll
  for (int u = 0; u < BATCH; u++) {
    marks[u].clear();
    if (FULL || target[u] >= 0) marks[u].load(t.folded + t.at(target[u], f));
  }
#pragma unroll
  for (int u = 0; u < BATCH; u++) {
    hits[u] = marks[u].at(place[u] & 127);
    shared[u] = TIES != FIRST && marks[u].any_shared();
    const long long first = t.at(target[u], f) + Folded::number(__ffs(hits[u]) - 1);
    grad[u] = hits[u] && t.confirms(first, place[u]) ? __ldg(t.grad + first) : 0;
  }
#pragma unroll
  for (int u = 0; u < BATCH; u++) {
    if (hits[u]) sum[Folded::number(__ffs(hits[u]) - 1)] += widen(grad[u]);
    hits[u] &= hits[u] - 1;
    any |= hits[u] || shared[u];
  }
  if (!any) return;
#pragma unroll
  for (int u = 0; u < BATCH; u++) {
    const long long at = t.at(target[u], f);
    for (; hits[u]; hits[u] &= hits[u] - 1) {
      const int v = Folded::number(__ffs(hits[u]) - 1);
      if (t.confirms(at + v, place[u])) sum[v] += widen(__ldg(t.grad + at + v));
    }
    if (shared[u]) add_shared(sum, t, x, at, unusual);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    reduce_fold(const place_t* __restrict__ mark, signed char* __restrict__ folded, long long count) {
  const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * VEC;
  if (at >= count) return;
  signed char bytes[VEC];
#pragma unroll
  for (int v = 0; v < VEC; v++) {
    const place_t one = __ldg(mark + at + v);
    bytes[v] = (one & 127) | (one < 0 ? 128 : 0);
  }
  Bits<VEC>::type bits;
  memcpy(&bits, bytes, VEC);
  *(Bits<VEC>::type*)(folded + at) = bits;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    reduce_scan(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                const long long* __restrict__ tiles, const index_t* __restrict__ place,
                const scalar_t* __restrict__ x, const place_t* __restrict__ mark,
                const signed char* __restrict__ folded, const scalar_t* __restrict__ grad,
                const scalar_t* __restrict__ best, scalar_t* __restrict__ dx,
                acc_t* __restrict__ partial, int* unusual, long long num_rows, long long num_tiles,
                long long split, int width) {
  __shared__ acc_t sums[THREADS * VEC];
  Item it;
  if (!find_item(it, group_of_launch(), rowptr, tiles, num_rows, num_tiles, split)) return;
  const Targets targets = {idx, place, grad, best, mark, folded, width};
  const int lane = threadIdx.x % LANES, first = blockIdx.y * LANES * VEC, f = first + lane * VEC;
  const unsigned group = group_mask();
  acc_t* row = sums + (threadIdx.x - lane) * VEC;  // of the group; a lane adds to its VEC numbers
#pragma unroll
  for (int v = 0; v < VEC; v++) row[v * LANES + lane] = 0;
  bool found = false;
  __syncwarp(group);
  if (FILLED || f < width) {
    const scalar_t* own = x + it.row * width + f;
    long long k = it.begin;
    for (; k + BATCH <= it.end; k += BATCH)
      add_batch<true>(row + lane * VEC, targets, own, k, it.end, f, &found);
    if (k < it.end) add_batch<false>(row + lane * VEC, targets, own, k, it.end, f, &found);
  }
  __syncwarp(group);
#pragma unroll
  for (int v = 0; v < VEC; v++) {
    const int at = first + v * LANES + lane;
    if (!FILLED && at >= width) break;
    const acc_t sum = row[v * LANES + lane];
    found |= !is_finite(sum);
    if (it.part >= 0)
      partial[it.part * width + at] = sum;
    else
      dx[it.row * width + at] = narrow(sum);
  }
  if (TIES == EVEN && found) *unusual = 1;
}
