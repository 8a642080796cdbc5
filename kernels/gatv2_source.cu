// gatv2_source — the gradient of x_l.
// Maths     grad_x_l[j] = sum_k weight_k * grad[idx[k]] + att * g, g = sum_k s_k * leaky'(z[k])
//           over the edges k from source j; the gradient of att gets sum_j x_l[j] * g
// Shapes    grad [N, H*C]  x_l, grad_x_l [S, H*C]  terms, signs as in gatv2_target.cu  slots [blocks, H*C]
//           rows and tiles by source, perm the positions by target; partial [T, H*C] (acc_t)
// Mapping   as in gatv2.cu, items in turns
// Traffic   gathers E rows of grad, of terms and of signs
// Numerics  acc_t sums in edge order, tiles merged in order by spmm_merge
// Limits    VEC divides C
#include "common/attend_source.cuh"
#include "common/signs.cuh"
#include "common/slots.cuh"

struct BackwardSource {
  struct Batch {
    Packed grad[BATCH][NV];
    Signs positive;
  };
  const Place& place;
  const scalar_t* grad;
  const unsigned char* signs;
  acc_t sum[NV][VEC], rise[NV][VEC], all[SLOTS];  // of s where z is positive, and everywhere

  template <bool FULL>
  DEVICE_MEMBER void load(Batch& rows, const index_t (&source)[BATCH],
                          const position_t (&own)[BATCH]) const {
    load_rows<FULL>(grad, source, place, rows.grad);
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      const position_t position = of_edge(own, u);
#pragma unroll
      for (int n = 0; n < NV; n++)
        rows.positive.bits[u][n] = place.inside(n) && (FULL || source[u] >= 0)
                                       ? load_signs(signs, position, n, place)
                                       : 0;
    }
  }
  DEVICE_MEMBER void add(Batch& rows, const acc_t (&weights)[SLOTS][BATCH],
                         const acc_t (&slopes)[SLOTS][BATCH]) {
    add_weighted(sum, weights, rows.grad);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
#pragma unroll
      for (int i = 0; i < OWN; i++) all[s] += slopes[s][i];
#pragma unroll
      for (int u = 0; u < BATCH; u++) {
        const acc_t slope = of_edge(slopes[s], u);
#pragma unroll
        for (int n = s * HEAD_VECS; n < (s + 1) * HEAD_VECS; n++)
          add_where(rise[n], rows.positive.bits[u][n], slope);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    gatv2_source(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                 const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                 const scalar_t* __restrict__ grad, const scalar_t* __restrict__ x_l,
                 const scalar_t* __restrict__ att, const acc_t* __restrict__ terms,
                 const unsigned char* __restrict__ signs, scalar_t* __restrict__ grad_x_l,
                 double* __restrict__ slots, acc_t* __restrict__ partial, long long num_rows,
                 long long num_tiles, long long split, long long num_loops, int heads,
                 int channels, double slope) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, num_loops};
  const Place place(heads, channels);
  ParameterSums att_sums;
  att_sums.clear();
  for (Turns turn; turn.first < num_rows + num_tiles; turn.next()) {
    const Edges edges(graph, turn.item);
    if (!any_group(edges.row >= 0)) continue;
    BackwardSource op = {place, grad, signs};
    clear(op.sum), clear(op.rise);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) op.all[s] = 0;
    attend_source(op, graph, edges, place, perm, terms);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) op.all[s] = sum_over_edges(op.all[s]);
    if (edges.row < 0) continue;
    acc_t vector[NV][VEC], x[NV][VEC];
    load_row(att, 0, place, vector);
    load_row(x_l, edges.row, place, x);
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int v = 0; v < VEC; v++) {
        op.rise[n][v] =
            (acc_t)slope * op.all[n / HEAD_VECS] + (1 - (acc_t)slope) * op.rise[n][v];
        op.sum[n][v] = fma(vector[n][v], op.rise[n][v], op.sum[n][v]);
      }
    att_sums.add(x, op.rise);
    if (edges.part >= 0)
      store_partial(partial, edges.part, place, op.sum);
    else
      store_row(grad_x_l, edges.row, place, op.sum);
  }
  att_sums.store(slots, place);
}
