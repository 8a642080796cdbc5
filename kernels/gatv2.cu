// gatv2 — attention by an MLP of both ends, no row of features stored for an edge.
// Maths     out[i] = sum_k softmax_k(score[k]) * x_l[idx[k]]
//           score[k] = att . leaky_relu(z[k]), z[k] = x_l[idx[k]] + x_r[i] + sum_d attr[k, d] lin[d]
// Shapes    x_l [S, H*C]  x_r, out [N, H*C]  att [H*C]  attr [E, D], loop_attr [L, D], lin [D, H*C]
//           or null  stats [N, 2*H] (acc_t)  scores [E + L, H] (acc_t) or null
//           signs [E + L, H * ceil(C / 8)] bytes or null: which z are positive (signs.cuh)
//           partial, partial_stats as out, stats, for each tile  rowptr [N + 1]  idx, perm [E]
// Mapping   all heads of a row or tile in LANES lanes (heads.cuh), more heads by blockIdx.y
// Traffic   gathers E rows of x_l (idx, and where given perm and attr); x_r, out and stats once
// Numerics  acc_t sums; a row without edges gives 0, one of scores -inf NaN; tiles merge in order
// Limits    VEC divides C
#include "common/attend.cuh"
#include "common/mlp.cuh"

template <bool EXACT> struct Forward {
  typedef Rows Batch;
  enum { RETRIES = !EXACT };
  Hidden<EXACT>& hidden;
  scalar_t* out;
  acc_t* partial;
  unsigned char* signs;
  acc_t sum[NV][VEC];

  template <bool FULL>
  DEVICE_MEMBER void load(Batch& rows, position_t k, const index_t (&source)[BATCH]) const {
    hidden.template load<FULL>(rows, k, source);
  }
  DEVICE_MEMBER void scores(Batch& rows, acc_t (&parts)[SLOTS][BATCH]) const {
    Signs positive;
    hidden.scores(rows, parts, positive);
#if SIGNS
    store_signs(signs, hidden.edges, rows.k, hidden.place, positive);
#endif
  }
  DEVICE_MEMBER acc_t score(acc_t total) const { return total; }
  DEVICE_MEMBER void add(Batch& rows, const acc_t (&change)[SLOTS],
                         const acc_t (&weights)[SLOTS][BATCH]) {
    rescale(sum, change);
    add_weighted(sum, weights, rows.x_l);
  }
  DEVICE_MEMBER void finish(long long row, long long part, const acc_t (&factor)[SLOTS]) {
    if (part >= 0) return store_partial(partial, part, hidden.place, sum);
    rescale(sum, factor);
    store_row(out, row, hidden.place, sum);
  }
};

template <bool EXACT>
DEVICE bool attends(const Graph& graph, const Edges& edges, const Place& place,
                    const Dropout& dropout, const Operands& operands, const scalar_t* x_r,
                    scalar_t* out, acc_t* partial, unsigned char* signs, const Kept& kept) {
  Hidden<EXACT> hidden = {operands, edges, place};
  hidden.start(x_r);
  Forward<EXACT> op = {hidden, out, partial, signs};
  clear(op.sum);
  return attend(op, graph, edges, place, dropout, kept);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    gatv2(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
          const index_t* __restrict__ perm, const long long* __restrict__ tiles,
          const scalar_t* __restrict__ x_l, const scalar_t* __restrict__ x_r,
          const scalar_t* __restrict__ att, const scalar_t* __restrict__ attr,
          const scalar_t* __restrict__ loop_attr, const scalar_t* __restrict__ lin,
          const long long* __restrict__ seed, scalar_t* __restrict__ out,
          acc_t* __restrict__ stats, acc_t* __restrict__ scores,
          unsigned char* __restrict__ signs, acc_t* __restrict__ partial,
          acc_t* __restrict__ partial_stats, long long num_rows, long long num_tiles,
          long long split, long long num_loops, int heads, int channels, int dim, double slope,
          long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, num_loops};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  const Operands operands = {x_l, att, perm, attr, loop_attr, lin, dim, (acc_t)slope};
  const Kept kept = {stats, partial_stats, scores};
  const bool whole = is_moderate(slope) &&
                     attends<false>(graph, edges, place, dropout, operands, x_r, out, partial, signs, kept);
  if (!whole) attends<true>(graph, edges, place, dropout, operands, x_r, out, partial, signs, kept);
}
