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
#include "common/attend_source.cuh"
#include "common/attend_target.cuh"
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
  DEVICE_MEMBER void load(Batch& rows, position_t k, const index_t (&source)[BATCH]) const {
    load_rows<FULL>(key, source, place, rows.key);
    load_rows<FULL>(value, source, place, rows.value);
  }
  DEVICE_MEMBER void scores(const Batch& rows, acc_t (&parts)[SLOTS][BATCH]) const {
    add_dots(query, rows.key, parts);
  }
  DEVICE_MEMBER acc_t score(acc_t total) const { return rounded_product(scale, total); }
  DEVICE_MEMBER void add(Batch& rows, const acc_t (&change)[SLOTS],
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
  clear(op.sum);
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

struct Backward {
  enum { AFTER_DROPOUT = false };  // the weights that are handed out
  typedef Forward::Batch Batch;
  const Place& place;
  const scalar_t *key, *value;
  scalar_t* grad_query;
  acc_t *partial, *partial_mass;
  acc_t scale, query[NV][VEC], grad[NV][VEC], sum[NV][VEC], mass[NV][VEC];

  template <bool FULL>
  DEVICE_MEMBER void load(Batch& rows, position_t k, const index_t (&source)[BATCH]) const {
    load_rows<FULL>(key, source, place, rows.key);
    load_rows<FULL>(value, source, place, rows.value);
  }
  DEVICE_MEMBER void dots(const Batch& rows, acc_t (&scores)[SLOTS][BATCH],
                          acc_t (&dots)[SLOTS][BATCH]) const {
    add_dots(query, rows.key, scores);
    add_dots(grad, rows.value, dots);
  }
  DEVICE_MEMBER acc_t score(acc_t total) const { return rounded_product(scale, total); }
  DEVICE_MEMBER void add(Batch& rows, const acc_t (&a)[SLOTS][BATCH],
                         const acc_t (&at)[SLOTS][BATCH]) {
    add_weighted(sum, at, rows.key);
    add_weighted(mass, a, rows.key);
  }
  DEVICE_MEMBER void finish(const Edges& edges, const acc_t (&shift)[SLOTS]) {
    if (edges.part >= 0) {
      store_partial(partial, edges.part, place, sum);
      store_partial(partial_mass, edges.part, place, mass);
      return;
    }
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int v = 0; v < VEC; v++)
        sum[n][v] = scale * fma(-shift[n / HEAD_VECS], mass[n][v], sum[n][v]);
    store_row(grad_query, edges.row, place, sum);
  }
};

// transformer_target — the gradient of the queries, and what the pass over the sources needs.
// Maths     grad_query[i] = scale * sum_k s_k * key[idx[k]], s_k as in attend_target.cuh
// Shapes    as above; grad [N, H*C]  grad_weights [E, H] (acc_t) or null  terms [E, 2, H] (acc_t)
//           partial, partial_mass, partial_delta, centre for each tile
// Mapping   as above; a block for each tile then settles its terms
// Traffic   gathers E rows of key and of value; terms out once (twice through the L2)
// Numerics  scores are those of the forward pass, bit for bit
// Limits    as above
extern "C" __global__ void __launch_bounds__(THREADS)
    transformer_target(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                       const long long* __restrict__ tiles, const scalar_t* __restrict__ grad,
                       const acc_t* __restrict__ grad_weights, const scalar_t* __restrict__ query,
                       const scalar_t* __restrict__ key, const scalar_t* __restrict__ value,
                       const acc_t* __restrict__ stats, const long long* __restrict__ seed,
                       scalar_t* __restrict__ grad_query, acc_t* terms,
                       acc_t* __restrict__ partial, acc_t* __restrict__ partial_mass,
                       acc_t* __restrict__ partial_delta, acc_t* __restrict__ centre,
                       long long num_rows, long long num_tiles, long long split, int heads,
                       int channels, double scale, long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  Backward op = {place, key, value, grad_query, partial, partial_mass, (acc_t)scale};
  load_row(query, edges.row, place, op.query);
  load_row(grad, edges.row, place, op.grad);
  clear(op.sum), clear(op.mass);
  attend_target(op, graph, edges, place, dropout,
                {stats, grad_weights, terms, partial_delta, centre});
}

extern "C" __global__ void __launch_bounds__(THREADS)
    transformer_settle(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                       const long long* __restrict__ tiles, const acc_t* __restrict__ delta,
                       acc_t* __restrict__ terms, long long num_rows, long long num_tiles,
                       long long split, int heads, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  settle_tile(graph, terms, delta, heads, (acc_t)keep);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    transformer_target_merge(const long long* __restrict__ tiles, acc_t* partial,
                             const acc_t* __restrict__ partial_mass,
                             const acc_t* __restrict__ centre, const acc_t* __restrict__ delta,
                             scalar_t* __restrict__ grad_query, long long num_tiles, int heads,
                             int channels, double scale) {
  const TargetMerge tables = {tiles, partial, partial_mass, centre,   delta,
                              nullptr, grad_query, heads,   channels, (acc_t)scale};
  merge_rows<TargetSum>(tables, tiles, num_tiles, heads * channels);
}

struct BackwardSource {
  struct Batch {
    Packed grad[BATCH][NV], query[BATCH][NV];
  };
  const Place& place;
  const scalar_t *grad, *query;
  acc_t sum[NV][VEC], key_sum[NV][VEC];

  template <bool FULL>
  DEVICE_MEMBER void load(Batch& rows, const index_t (&source)[BATCH],
                          const position_t (&own)[BATCH]) const {
    load_rows<FULL>(grad, source, place, rows.grad);
    load_rows<FULL>(query, source, place, rows.query);
  }
  DEVICE_MEMBER void add(Batch& rows, const acc_t (&weights)[SLOTS][BATCH],
                         const acc_t (&slopes)[SLOTS][BATCH]) {
    add_weighted(sum, weights, rows.grad);
    add_weighted(key_sum, slopes, rows.query);
  }
};

// transformer_source — the gradients of keys and values.
// Maths     grad_value[j] = sum_k weight_k * grad[idx[k]]
//           grad_key[j] = scale * sum_k s_k * query[idx[k]]  over the edges k from source j
// Shapes    grad, query [N, H*C]  grad_key, grad_value [S, H*C]  terms [E, 2, H] (acc_t)
//           rows and tiles by source, perm the positions by target; partial [2, T, H*C] (acc_t)
// Mapping   as above
// Traffic   gathers E rows of grad, of query and of terms
// Numerics  acc_t sums in edge order, tiles merged in order by spmm_merge
// Limits    as above
extern "C" __global__ void __launch_bounds__(THREADS)
    transformer_source(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                       const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                       const scalar_t* __restrict__ grad, const scalar_t* __restrict__ query,
                       const acc_t* __restrict__ terms, scalar_t* __restrict__ grad_value,
                       scalar_t* __restrict__ grad_key, acc_t* __restrict__ partial,
                       long long num_rows, long long num_tiles, long long split, int heads,
                       int channels, double scale) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  BackwardSource op = {place, grad, query};
  clear(op.sum), clear(op.key_sum);
  attend_source(op, graph, edges, place, perm, terms);
  if (edges.row < 0) return;
#pragma unroll
  for (int n = 0; n < NV; n++)
#pragma unroll
    for (int v = 0; v < VEC; v++) op.key_sum[n][v] *= (acc_t)scale;
  if (edges.part >= 0) {
    store_partial(partial, edges.part, place, op.sum);
    store_partial(partial, num_tiles + edges.part, place, op.key_sum);
  } else {
    store_row(grad_value, edges.row, place, op.sum);
    store_row(grad_key, edges.row, place, op.key_sum);
  }
}
