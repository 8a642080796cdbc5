// transformer_source — the gradient of the keys.
// Maths     grad_key[j] = scale * sum_k s_k * query[idx[k]] over the edges k from source j
// Shapes    query [N, H*C]  grad_key [S, H*C]  terms [E, H] (acc_t): s_k, as transformer_target left it
//           rows and tiles by source, perm the positions by target; partial [T, H*C] (acc_t)
// Mapping   as in transformer.cu
// Traffic   gathers E rows of query and of terms
// Numerics  acc_t sums in edge order, tiles merged in order by spmm_merge
// Limits    VEC divides C
#define LOOPS 0
#include "common/edges.cuh"

struct BackwardSource {
  const Edges& edges;
  const Place& place;
  const index_t* perm;
  const scalar_t* query;
  const acc_t* terms;
  acc_t sum[NV][VEC];
  position_t next[BATCH];  // positions of the lane's edges of the next batch

  DEVICE_MEMBER void fetch(position_t k) {
#pragma unroll
    for (int i = 0; i < OWN; i++) next[i] = edges.position(perm, k + place.own_edge(i));
  }
  template <bool FULL> DEVICE_MEMBER void batch(position_t k, const index_t (&mine)[LOADS]) {
    index_t source[BATCH];
    spread<FULL>(mine, source);
    acc_t slopes[SLOTS][BATCH];
#pragma unroll
    for (int s = 0; s < SLOTS; s++)
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const acc_t* at = number_at(terms, next[i], place, s);
        const bool exists = FULL || k + place.own_edge(i) < edges.end;
        slopes[s][i] = exists && place.has(s) ? __ldg(at) : 0;
      }
    fetch(k + BATCH);
    Packed rows[BATCH][NV];
    load_rows<FULL>(query, source, place, rows);
    add_weighted(sum, slopes, rows);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    transformer_source(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                       const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                       const scalar_t* __restrict__ query, const acc_t* __restrict__ terms,
                       scalar_t* __restrict__ grad_key, acc_t* __restrict__ partial,
                       long long num_rows, long long num_tiles, long long split, int heads,
                       int channels, double scale) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  BackwardSource step = {edges, place, perm, query, terms};
  clear(step.sum);
  step.fetch(edges.begin);
  walk(edges, idx, step);
  if (edges.row < 0) return;
#pragma unroll
  for (int n = 0; n < NV; n++)
#pragma unroll
    for (int v = 0; v < VEC; v++) step.sum[n][v] *= (acc_t)scale;
  store_sums(grad_key, partial, edges, place, step.sum);
}
