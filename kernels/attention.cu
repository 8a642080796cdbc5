// attention_merge — split rows of gatv2 and transformer.
// Maths     sums and stats of a row from those of its tiles (softmax.cuh), divided
// Shapes    partial [T, H*C]  partial_stats [T, 2*H]  out [N, H*C]  stats [N, 2*H] (acc_t) or null
// Mapping   merge.cuh
// Traffic   each tile's partials once
// Numerics  tiles in a fixed order
// Limits    VEC divides C
#define BATCH 1
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
