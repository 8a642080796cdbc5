// attention_merge, attention_settle, attention_target_merge — split rows of gatv2 and transformer.
// Maths     merge: sums and stats of a row from those of its tiles (softmax.cuh), divided
//           settle: terms of a tile's edges, as attend_target.cuh, once delta is known
//           target_merge: out = factor * (att *) sum over tiles of sum - (delta - centre) * mass
// Shapes    partial, mass [T, H*C]  partial_stats [T, 2*H]  centre [T, H]  delta [N, H] (acc_t)
//           out [N, H*C]  stats [N, 2*H] (acc_t) or null  terms [E + L, 2, H] (acc_t)
//           att [H*C] or null; with it partial gets, for the first tile of a row, out without att
// Mapping   merges as merge.cuh; settle: a block for each tile
// Traffic   each tile's partials once; terms of split rows twice
// Numerics  tiles in a fixed order
// Limits    VEC divides C
#define BATCH 1
#include "common/attend_target.cuh"
#include "common/merge.cuh"
#include "common/softmax.cuh"

struct AttentionTables {
  const acc_t *partial, *partial_stats;
  scalar_t* out;
  acc_t* stats;  // may be null
  int heads, channels;
};

struct AttentionSum {
  acc_t values[VEC], top, total;
  DEVICE_MEMBER AttentionSum() {}
  DEVICE_MEMBER AttentionSum(const AttentionTables& t, long long part, int f) {
    const long long at = part * 2 * t.heads + f / t.channels;
    top = t.partial_stats[at], total = t.partial_stats[at + t.heads];
#pragma unroll
    for (int v = 0; v < VEC; v++) values[v] = t.partial[part * t.heads * t.channels + f + v];
  }
  DEVICE_MEMBER void add(const AttentionSum& other) {
    const acc_t best = max(top, other.top);
    const acc_t mine = change_of(top, best), theirs = change_of(other.top, best);
    top = best, total = total * mine + other.total * theirs;
#pragma unroll
    for (int v = 0; v < VEC; v++) values[v] = values[v] * mine + other.values[v] * theirs;
  }
  DEVICE_MEMBER void finish(const AttentionTables& t, long long row, int f) {
    const bool none = top == -INF && total == 0;
    const acc_t inverse = none ? 0 : inverse_of(top, total);
#pragma unroll
    for (int v = 0; v < VEC; v++) values[v] *= inverse;
    store(t.out + row * t.heads * t.channels + f, values);
    if (t.stats == nullptr || f % t.channels) return;
    acc_t* stats = t.stats + row * 2 * t.heads + f / t.channels;
    stats[0] = none ? 0 : top, stats[t.heads] = inverse;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_merge(const long long* __restrict__ tiles, const acc_t* __restrict__ partial,
                    const acc_t* __restrict__ partial_stats, scalar_t* __restrict__ out,
                    acc_t* __restrict__ stats, long long num_tiles, int heads, int channels) {
  const AttentionTables tables = {partial, partial_stats, out, stats, heads, channels};
  merge_rows<AttentionSum>(tables, tiles, num_tiles, heads * channels);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_settle(const index_t* __restrict__ rowptr, const long long* __restrict__ tiles,
                     const acc_t* __restrict__ delta, acc_t* __restrict__ terms,
                     long long num_rows, long long num_tiles, long long split,
                     long long num_loops, int heads, double keep) {
  const Graph graph = {rowptr, nullptr, tiles, num_rows, num_tiles, split, num_loops};
  const Edges edges(graph, blockIdx.x);
  const long long count = (long long)(edges.stop - edges.begin) * heads;
  for (long long n = threadIdx.x; n < count; n += THREADS) {
    const int head = n % heads;
    acc_t* at = terms + edges.position(edges.begin + n / heads) * 2 * heads + head;
    settle(at[0], at[heads], delta[(long long)edges.row * heads + head], (acc_t)keep);
  }
}

struct TargetMerge {
  const long long* tiles;
  acc_t* partial;  // the first sum; gets what is written before it is multiplied by att
  const acc_t *partial_mass, *centre, *delta;
  const scalar_t* att;  // may be null
  scalar_t* out;
  int heads, channels;
  acc_t factor;
};

struct TargetSum {
  acc_t values[VEC];
  long long part;
  DEVICE_MEMBER TargetSum() {}
  DEVICE_MEMBER TargetSum(const TargetMerge& t, long long from, int f) {
    const long long at = from * t.heads * t.channels + f;
    const int head = f / t.channels;
    const acc_t delta = t.delta[t.tiles[4 * from] * t.heads + head];
    const acc_t shift = delta - t.centre[from * t.heads + head];
    part = from;
#pragma unroll
    for (int v = 0; v < VEC; v++)
      values[v] = fma(-shift, t.partial_mass[at + v], t.partial[at + v]);
  }
  DEVICE_MEMBER void add(const TargetSum& other) {
#pragma unroll
    for (int v = 0; v < VEC; v++) values[v] += other.values[v];
  }
  DEVICE_MEMBER void finish(const TargetMerge& t, long long row, int f) {
    const int width = t.heads * t.channels;
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      values[v] *= t.factor;
      if (t.att != nullptr) {
        const acc_t delta = t.delta[row * t.heads + f / t.channels];
        values[v] += delta - delta;  // as the sum over edges that are not positive: NaN, or nothing
        t.partial[part * width + f + v] = values[v];
        values[v] *= widen(t.att[f + v]);
      }
    }
    store(t.out + row * width + f, values);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_target_merge(const long long* __restrict__ tiles, acc_t* partial,
                           const acc_t* __restrict__ partial_mass,
                           const acc_t* __restrict__ centre, const acc_t* __restrict__ delta,
                           const scalar_t* __restrict__ att, scalar_t* __restrict__ out,
                           long long num_tiles, int heads, int channels, double factor) {
  const TargetMerge tables = {tiles, partial, partial_mass, centre,   delta,
                              att,   out,     heads,        channels, (acc_t)factor};
  merge_rows<TargetSum>(tables, tiles, num_tiles, heads * channels);
}
