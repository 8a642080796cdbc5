// gatv2_source — the gradients of x_l and of the scores.
// Maths     grad_x_l[j] = sum_k weight_k * grad[idx[k]] + att * g, g = sum_k s_k * leaky'(z[k])
//           over the edges k from source j, s_k as in attend_source.cuh
//           the gradient of att gets sum_j x_l[j] * g
// Shapes    grad [N, H*C]  x_l, grad_x_l [S, H*C]  scores, signs as in gatv2.cu
//           common [N, H, 4] (acc_t), from attention_delta  more, terms [E + L, H] (acc_t)  slots [blocks, H*C] (double)
//           rows and tiles by source, perm the positions by target; partial [T, H*C] (acc_t)
// Mapping   as in gatv2.cu, items in turns
// Traffic   gathers E rows of grad, of scores, of common and of signs, and writes terms at
//           E places
// Numerics  acc_t sums in edge order, tiles merged in order by spmm_merge
// Limits    VEC divides C
#include "common/attend_source.cuh"
#include "common/signs.cuh"
#include "common/slots.cuh"

struct BackwardSource {
  struct Batch {
    Packed grad[BATCH][NV];
    SignWords words;
  };
  const Edges& edges;
  const Place& place;
  const index_t *idx, *perm;
  const scalar_t* grad;
  const unsigned char* signs;
  acc_t x_l[NV][VEC], sum[NV][VEC];
  SignedSums sums;

  template <bool FULL>
  DEVICE_MEMBER void load(Batch& rows, const index_t (&source)[BATCH], position_t k) const {
    load_rows<FULL>(grad, source, place, rows.grad);
    position_t positions[BATCH];
#pragma unroll
    for (int i = 0; i < WORD_OWN; i++)
      positions[i] = edges.find(idx, perm, k + word_edge(i, place));
    rows.words.load(signs, positions, place);
  }
  DEVICE_MEMBER void dots(const Batch& rows, acc_t (&dots)[SLOTS][BATCH]) const {
    add_dots(x_l, rows.grad, dots);
  }
  DEVICE_MEMBER void add(Batch& rows, const acc_t (&weights)[SLOTS][BATCH],
                         const acc_t (&slopes)[SLOTS][BATCH]) {
    add_weighted(sum, weights, rows.grad);
    sums.add(slopes, rows.words, place);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    gatv2_source(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                 const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                 const scalar_t* __restrict__ grad, const scalar_t* __restrict__ x_l,
                 const scalar_t* __restrict__ att, const acc_t* __restrict__ scores,
                 const acc_t* __restrict__ common, const acc_t* __restrict__ more,
                 const unsigned char* __restrict__ signs,
                 const long long* __restrict__ seed, acc_t* __restrict__ terms,
                 scalar_t* __restrict__ grad_x_l, double* __restrict__ slots,
                 acc_t* __restrict__ partial, long long num_rows, long long num_tiles,
                 long long split, long long num_loops, int heads, int channels, double slope,
                 long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, num_loops};
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  const SourceTables tables = {idx, perm, scores, common, more, terms};
  ParameterSums att_sums;
  att_sums.clear();
  for (Turns turn; turn.first < num_rows + num_tiles; turn.next()) {
    const Edges edges(graph, turn.item);
    if (!any_group(edges.row >= 0)) continue;
    BackwardSource op = {edges, place, idx, perm, grad, signs};
    load_row(x_l, edges.row, place, op.x_l);
    clear(op.sum), op.sums.clear();
    attend_source(op, edges, place, dropout, tables);
    op.sums.finish();
    if (edges.row < 0) continue;
    acc_t vector[NV][VEC];
    load_row(att, 0, place, vector);
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int v = 0; v < VEC; v++) {
        acc_t& rise = op.sums.rise[n][v];
        rise = (acc_t)slope * op.sums.all[n / HEAD_VECS] + (1 - (acc_t)slope) * rise;
        op.sum[n][v] = fma(vector[n][v], rise, op.sum[n][v]);
      }
    att_sums.add(op.x_l, op.sums.rise);
    if (edges.part >= 0)
      store_partial(partial, edges.part, place, op.sum);
    else
      store_row(grad_x_l, edges.row, place, op.sum);
  }
  att_sums.store(slots, place);
}
