// transformer — attention by dot products of both ends, nothing edge-sized stored.
// Maths     out[i] = sum_k softmax_k(scale * query[i] . key[idx[k]]) * value[idx[k]]
// Shapes    query, out [N, H*C]  key, value [S, H*C]  stats [N, 2*H] (acc_t)  scores [E, H] (acc_t)
//           or null  partial, partial_stats as out, stats, for each tile  rowptr [N + 1]  idx [E]
// Mapping   all heads of a row or tile in LANES lanes (heads.cuh), more heads by blockIdx.y
// Traffic   gathers E rows of key and of value (and idx); query, out and stats once
// Numerics  acc_t sums; a row without edges gives 0, one of scores -inf NaN; tiles merge in order
// Limits    VEC divides C
#define LOOPS 0
#define ROW_WORDS (NV * VEC * (int)sizeof(scalar_t) / 4)
#define BATCH (ROW_WORDS <= 2 ? 8 : ROW_WORDS <= 4 ? 4 : ROW_WORDS <= 8 ? 2 : 1)
#include "common/attend.cuh"
#include "common/merge.cuh"

struct Forward {
  struct Batch {
    Packed key[BATCH][NV], value[BATCH][NV];
  };
  const Place& place;
  const scalar_t *key, *value;
  scalar_t* out;
  acc_t* partial;
  acc_t scale, query[NV][VEC], sum[NV][VEC];

  template <bool FULL>
  DEVICE_MEMBER void load(Batch& rows, long long k, const index_t (&source)[BATCH]) const {
    load_rows<FULL>(key, source, place, rows.key);
    load_rows<FULL>(value, source, place, rows.value);
  }
  DEVICE_MEMBER void scores(const Batch& rows, acc_t (&parts)[SLOTS][BATCH]) const {
    add_dots(query, rows.key, parts);
  }
  DEVICE_MEMBER acc_t score(acc_t total) const { return scale * total; }
  DEVICE_MEMBER void add(const Batch& rows, const acc_t (&change)[SLOTS],
                         const acc_t (&weights)[SLOTS][BATCH]) {
    rescale(sum, change);
    add_weighted(sum, weights, rows.value);
  }
  DEVICE_MEMBER void finish(long long row, long long part, const acc_t (&factor)[SLOTS]) {
    if (part >= 0) return store_partial(partial, part, place, sum);
    rescale(sum, factor);
    store_row(out, row, place, sum);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    transformer(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                const long long* __restrict__ tiles, const scalar_t* __restrict__ query,
                const scalar_t* __restrict__ key, const scalar_t* __restrict__ value,
                const long long* __restrict__ seed, scalar_t* __restrict__ out,
                acc_t* __restrict__ stats, acc_t* __restrict__ scores,
                acc_t* __restrict__ partial, acc_t* __restrict__ partial_stats,
                long long num_rows, long long num_tiles, long long split, int heads, int channels,
                double scale, long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  Forward op = {place, key, value, out, partial, (acc_t)scale};
  load_row(query, edges.row, place, op.query);
  attend(op, graph, edges, place, dropout, {stats, partial_stats, scores});
}

extern "C" __global__ void __launch_bounds__(THREADS)
    transformer_merge(const long long* __restrict__ tiles, const acc_t* __restrict__ partial,
                      const acc_t* __restrict__ partial_stats, scalar_t* __restrict__ out,
                      acc_t* __restrict__ stats, long long num_tiles, int heads, int channels) {
  const AttentionTables tables = {partial, partial_stats, out, stats, heads, channels};
  merge_rows<AttentionSum>(tables, tiles, num_tiles, heads * channels);
}
