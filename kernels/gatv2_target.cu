// gatv2_target — the gradient of x_r, and what the pass over the sources needs.
// Maths     grad_x_r[i] = att * g, g = sum_k s_k * leaky'(z[k]), s_k as in attend_target.cuh
//           the gradient of att gets sum_i x_r[i] * g
// Shapes    as in gatv2.cu; grad [N, H*C]  grad_weights [E + L, H] (acc_t) or null
//           terms [E + L, 2, H] (acc_t)  signs [E + L, H * ceil(C / 8)] bytes (signs.cuh)
//           slots [blocks, H*C] (double)  partial, partial_mass, partial_delta, centre for each tile
// Mapping   as in gatv2.cu, items in turns; then a block for each tile settles its terms, and
//           gatv2_att adds the split rows' part of the gradient of att
// Traffic   gathers E rows of x_l; terms and signs out once (terms twice through the L2)
// Numerics  scores are those of the forward pass, bit for bit
// Limits    VEC divides C
#include "common/attend_target.cuh"
#include "common/mlp.cuh"
#include "common/slots.cuh"

struct Backward {
  enum { AFTER_DROPOUT = true };  // the weights that are handed out
  struct Batch : Rows {
    Signs positive;
  };
  Hidden& hidden;
  scalar_t* grad_x_r;
  unsigned char* signs;
  acc_t *partial, *partial_mass;
  ParameterSums& att_sums;
  acc_t grad[NV][VEC], sum[NV][VEC], mass[NV][VEC];  // the sums over edges with z positive

  template <bool FULL>
  DEVICE_MEMBER void load(Batch& rows, position_t k, const index_t (&source)[BATCH]) const {
    hidden.load<FULL>(rows, k, source);
  }
  DEVICE_MEMBER void dots(Batch& rows, acc_t (&scores)[SLOTS][BATCH],
                          acc_t (&dots)[SLOTS][BATCH]) const {
    hidden.scores(rows, scores, rows.positive);
    add_dots(grad, rows.x_l, dots);
    store_signs(signs, hidden.edges, rows.k, hidden.place, rows.positive);
  }
  DEVICE_MEMBER acc_t score(acc_t total) const { return total; }
  DEVICE_MEMBER void add(Batch& rows, const acc_t (&a)[SLOTS][BATCH],
                         const acc_t (&at)[SLOTS][BATCH]) {
#pragma unroll
    for (int u = 0; u < BATCH; u++)
#pragma unroll
      for (int s = 0; s < SLOTS; s++) {
        const acc_t one = of_edge(a[s], u), other = of_edge(at[s], u);
#pragma unroll
        for (int n = s * HEAD_VECS; n < (s + 1) * HEAD_VECS; n++) {
          add_where(mass[n], rows.positive.bits[u][n], one);
          add_where(sum[n], rows.positive.bits[u][n], other);
        }
      }
  }
  DEVICE_MEMBER void recentre(int s, acc_t by) {
#pragma unroll
    for (int n = s * HEAD_VECS; n < (s + 1) * HEAD_VECS; n++) add_scaled(sum[n], by, mass[n]);
  }
  // Since sum_k s_k = 0, sum_k s_k * leaky'(z[k]) is (1 - slope) times the sum where z is positive.
  DEVICE_MEMBER void finish(const Edges& edges, const acc_t (&shift)[SLOTS]) {
    if (edges.part >= 0) {
      store_partial(partial, edges.part, hidden.place, sum);
      store_partial(partial_mass, edges.part, hidden.place, mass);
      return;
    }
    acc_t out[NV][VEC];
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int v = 0; v < VEC; v++) {
        const acc_t moved = shift[n / HEAD_VECS];
        sum[n][v] = (1 - hidden.from.slope) * fma(-moved, mass[n][v], sum[n][v]);
        sum[n][v] += moved - moved;  // NaN, or nothing
        out[n][v] = hidden.att[n][v] * sum[n][v];
      }
    att_sums.add(hidden.x_r, sum);
    store_row(grad_x_r, edges.row, hidden.place, out);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    gatv2_target(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                 const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                 const scalar_t* __restrict__ grad, const acc_t* __restrict__ grad_weights,
                 const scalar_t* __restrict__ x_l, const scalar_t* __restrict__ x_r,
                 const scalar_t* __restrict__ att, const acc_t* __restrict__ stats,
                 const scalar_t* __restrict__ attr, const scalar_t* __restrict__ loop_attr,
                 const scalar_t* __restrict__ lin, const long long* __restrict__ seed,
                 scalar_t* __restrict__ grad_x_r, acc_t* terms, unsigned char* __restrict__ signs,
                 double* __restrict__ slots, acc_t* __restrict__ partial,
                 acc_t* __restrict__ partial_mass, acc_t* __restrict__ partial_delta,
                 acc_t* __restrict__ centre, long long num_rows, long long num_tiles,
                 long long split, long long num_loops, int heads, int channels, int dim,
                 double slope, long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, num_loops};
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  const Operands operands = {x_l, att, perm, attr, loop_attr, lin, dim, (acc_t)slope};
  ParameterSums att_sums;
  att_sums.clear();
  for (Turns turn; turn.first < num_rows + num_tiles; turn.next()) {
    const Edges edges(graph, turn.item);
    if (!any_group(edges.row >= 0)) continue;
    Hidden hidden = {operands, edges, place};
    hidden.start(x_r);
    Backward op = {hidden, grad_x_r, signs, partial, partial_mass, att_sums};
    load_row(grad, edges.row, place, op.grad);
    clear(op.sum), clear(op.mass);
    attend_target(op, graph, edges, place, dropout,
                  {stats, grad_weights, terms, partial_delta, centre});
  }
  att_sums.store(slots, place);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gatv2_att(const long long* __restrict__ tiles, const scalar_t* __restrict__ x_r,
              const acc_t* __restrict__ partial, double* __restrict__ slots, long long num_tiles,
              int heads, int channels) {
  const Place place(heads, channels);
  ParameterSums att_sums;
  att_sums.clear();
  for (Turns turn; turn.item < num_tiles; turn.next()) {
    if (tiles[4 * turn.item + 3] == 0) continue;
    acc_t x[NV][VEC], g[NV][VEC] = {};
    load_row(x_r, tiles[4 * turn.item], place, x);
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int v = 0; v < VEC; v++)
        if (place.inside(n)) g[n][v] = partial[turn.item * place.width + place.feature(n) + v];
    att_sums.add(x, g);
  }
  att_sums.store(slots, place);
}
