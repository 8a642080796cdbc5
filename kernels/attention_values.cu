// attention_values — the gradient of the values, and what that of the scores is made of.
// Maths     grad_value[j] = sum_k weight_k * grad[idx[k]]; terms[perm[k]] = <grad[idx[k]], value[j]>
//           over the edges k from source j, weight_k the softmax of scores, through dropout
// Shapes    grad [N, H*C]  value [S, H*C]  scores, terms [E + L, H] (acc_t)  stats [N, 2*H] (acc_t)
//           rows and tiles by source, perm the positions by target; partial [T, H*C] (acc_t)
//           grad_value [S, H*C] or null, else sums, the same in acc_t
// Mapping   all heads of a row or tile in LANES lanes (heads.cuh), more heads by blockIdx.y
// Traffic   gathers E rows of grad, of scores and of stats, and writes terms at E places
// Numerics  acc_t sums in edge order, tiles merged in order by spmm_merge; terms as in gatv2.cu
// Limits    VEC divides C
#include "common/edges.cuh"
#include "common/philox.cuh"

struct Values {
  const Edges& edges;
  const Place& place;
  const Dropout& dropout;
  const index_t *idx, *perm;
  const scalar_t* grad;
  const acc_t *scores, *stats;
  acc_t* terms;
  acc_t value[NV][VEC], sum[NV][VEC];
  position_t next[BATCH];   // positions of the lane's edges of the next batch
  index_t next_row[BATCH];  // and their targets, where they are not those that it loads for all

  DEVICE_MEMBER void fetch(position_t k) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const position_t at = k + place.own_edge(i);
      next[i] = edges.position(perm, at);
      if (OWN > 1) next_row[i] = edges.source(idx, at);
    }
  }
  template <bool FULL> DEVICE_MEMBER void batch(position_t k, const index_t (&mine)[LOADS]) {
    index_t source[BATCH];
    spread<FULL>(mine, source);
    position_t own[BATCH];
    bool has[SLOTS][BATCH];
    acc_t weights[SLOTS][BATCH], top[SLOTS][BATCH], inverse[SLOTS][BATCH];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const index_t target = OWN > 1 ? next_row[i] : mine[0];
      own[i] = next[i];
#pragma unroll
      for (int s = 0; s < SLOTS; s++) {
        const acc_t* score = number_at(scores, own[i], place, s);
        const acc_t* row = in_row(stats, target, 2 * place.heads, place.head_of(s));
        has[s][i] = (FULL || target >= 0) && place.has(s);
        weights[s][i] = has[s][i] ? __ldg(score) : 0;
        top[s][i] = has[s][i] ? __ldg(row) : 0;
        inverse[s][i] = has[s][i] ? __ldg(row + place.heads) : 0;
      }
    }
    fetch(k + BATCH);
    Packed rows[BATCH][NV];
    load_rows<FULL>(grad, source, place, rows);
    acc_t dots[SLOTS][BATCH] = {};
    add_dots(value, rows, dots);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      combine<HEAD_LANES>(dots[s], place.sub, Plus());
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        weights[s][i] = exp(weights[s][i] - top[s][i]) * inverse[s][i];
        acc_t* term = number_at(terms, own[i], place, s);
        if (has[s][i] && place.writes(s)) *term = dots[s][i];
#if DROPOUT
        weights[s][i] *= dropout.factor(own[i], place.head_of(s));
#endif
      }
    }
    add_weighted(sum, weights, rows);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    attention_values(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                     const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                     const scalar_t* __restrict__ grad, const scalar_t* __restrict__ value,
                     const acc_t* __restrict__ scores, const acc_t* __restrict__ stats,
                     const long long* __restrict__ seed, scalar_t* __restrict__ grad_value,
                     acc_t* __restrict__ sums, acc_t* __restrict__ terms,
                     acc_t* __restrict__ partial, long long num_rows, long long num_tiles,
                     long long split, long long num_loops, int heads, int channels,
                     long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, num_loops};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  Values step = {edges, place, dropout, idx, perm, grad, scores, stats, terms};
  load_row(value, edges.row, place, step.value);
  clear(step.sum);
  step.fetch(edges.begin);
  walk(edges, idx, step);
  if (edges.row < 0) return;
  if (edges.part >= 0)
    store_partial(partial, edges.part, place, step.sum);
  else if (grad_value == nullptr)
    store_partial(sums, edges.row, place, step.sum);
  else
    store_row(grad_value, edges.row, place, step.sum);
}
