// transformer_source — the gradients of keys, of values and of the scores.
// Maths     grad_value[j] = sum_k weight_k * grad[idx[k]]
//           grad_key[j] = scale * sum_k s_k * query[idx[k]]  over the edges k from source j, s_k as
//           in attend_source.cuh
// Shapes    grad, query [N, H*C]  value, grad_key, grad_value [S, H*C]  scores as in
//           transformer.cu  common [N, H, 4] (acc_t), from attention_delta  more, terms [E, H] (acc_t)
//           rows and tiles by source, perm the positions by target; partial [2, T, H*C] (acc_t)
// Mapping   as in transformer.cu
// Traffic   gathers E rows of grad, of query, of scores and of common, and writes terms at
//           E places
// Numerics  acc_t sums in edge order, tiles merged in order by spmm_merge
// Limits    VEC divides C
#define LOOPS 0
#include "common/attend_source.cuh"

struct BackwardSource {
  struct Batch {
    Packed grad[BATCH][NV], query[BATCH][NV];
  };
  const Place& place;
  const scalar_t *grad, *query;
  acc_t value[NV][VEC], sum[NV][VEC], key_sum[NV][VEC];

  template <bool FULL>
  DEVICE_MEMBER void load(Batch& rows, const index_t (&source)[BATCH], position_t) const {
    load_rows<FULL>(grad, source, place, rows.grad);
    load_rows<FULL>(query, source, place, rows.query);
  }
  DEVICE_MEMBER void dots(const Batch& rows, acc_t (&dots)[SLOTS][BATCH]) const {
    add_dots(value, rows.grad, dots);
  }
  DEVICE_MEMBER void add(Batch& rows, const acc_t (&weights)[SLOTS][BATCH],
                         const acc_t (&slopes)[SLOTS][BATCH]) {
    add_weighted(sum, weights, rows.grad);
    add_weighted(key_sum, slopes, rows.query);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    transformer_source(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                       const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                       const scalar_t* __restrict__ grad, const scalar_t* __restrict__ query,
                       const scalar_t* __restrict__ value, const acc_t* __restrict__ scores,
                       const acc_t* __restrict__ common, const acc_t* __restrict__ more,
                       const long long* __restrict__ seed,
                       acc_t* __restrict__ terms, scalar_t* __restrict__ grad_value,
                       scalar_t* __restrict__ grad_key, acc_t* __restrict__ partial,
                       long long num_rows, long long num_tiles, long long split, int heads,
                       int channels, double scale, long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  const SourceTables tables = {idx, perm, scores, common, more, terms};
  BackwardSource op = {place, grad, query};
  load_row(value, edges.row, place, op.value);
  clear(op.sum), clear(op.key_sum);
  attend_source(op, edges, place, dropout, tables);
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
