// gatv2 — attention by an MLP of both ends, nothing edge-sized stored.
// Maths     out[i] = sum_k softmax_k(score[k]) * x_l[idx[k]]
//           score[k] = att . leaky_relu(z[k]), z[k] = x_l[idx[k]] + x_r[i] + sum_d attr[k, d] lin[d]
// Shapes    x_l [S, H*C]  x_r, out [N, H*C]  att [H*C]  attr [E, D], loop_attr [L, D], lin [D, H*C]
//           or null  stats [N, 2*H] (acc_t)  scores [E + L, H] (acc_t) or null
//           partial, partial_stats as out, stats, for each tile  rowptr [N + 1]  idx, perm [E]
// Mapping   all heads of a row or tile in LANES lanes (heads.cuh), more heads by blockIdx.y
// Traffic   gathers E rows of x_l (idx, and where given perm and attr); x_r, out and stats once
// Numerics  acc_t sums; a row without edges gives 0, one of scores -inf NaN; tiles merge in order
// Limits    VEC divides C
#define ROW_WORDS (NV * VEC * (int)sizeof(acc_t) / (EDGES ? 2 : 4))
#define BATCH (ROW_WORDS <= 4 ? 8 : ROW_WORDS <= 8 ? 4 : ROW_WORDS <= 16 ? 2 : 1)
// Blocks of a multiprocessor: what fits without spills.
#define RESIDENT (NV == 1 && !EDGES && SCALAR != 1 ? 6 : 1)
#include "common/attend.cuh"
#include "common/attend_source.cuh"
#include "common/attend_target.cuh"
#include "common/merge.cuh"
#include "common/signs.cuh"
#include "common/slots.cuh"

// What scores are made of.
struct Operands {
  const scalar_t *x_l, *att;
  const index_t* perm;
  const scalar_t *attr, *loop_attr, *lin;
  int dim;
  acc_t slope;
};

struct Rows {
  Packed x_l[BATCH][NV];
#if EDGES
  const scalar_t* attr[BATCH];
#endif
  position_t k;
};

struct Hidden {
  const Operands& from;
  const Edges& edges;
  const Place& place;
  acc_t x_r[NV][VEC], att[NV][VEC];

  DEVICE_MEMBER void start(const scalar_t* rows_r) {
    load_row(rows_r, edges.row, place, x_r);
    load_row(from.att, 0, place, att);
  }

  template <bool FULL>
  DEVICE_MEMBER void load(Rows& rows, position_t k, const index_t (&source)[BATCH]) const {
    rows.k = k;
#if EDGES
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      rows.attr[u] = from.lin;  // that of no edge is not used
      if (LOOPS && k + u == edges.end && source[u] >= 0)
        rows.attr[u] = from.loop_attr + (long long)edges.row * from.dim;
      else if (FULL || source[u] >= 0)
        rows.attr[u] =
            from.attr + (long long)(from.perm ? (position_t)__ldg(from.perm + k + u) : k + u) * from.dim;
    }
#endif
    load_rows<FULL>(from.x_l, source, place, rows.x_l);
  }

  // z of each edge, before the leaky_relu
  DEVICE_MEMBER void add_ends(const Rows& rows, acc_t (&z)[BATCH][NV][VEC]) const {
#pragma unroll
    for (int u = 0; u < BATCH; u++)
#pragma unroll
      for (int n = 0; n < NV; n++) {
        unpack(rows.x_l[u][n], z[u][n]);
#pragma unroll
        for (int v = 0; v < VEC; v++) z[u][n][v] += x_r[n][v];
      }
#if EDGES
    for (int d = 0; d < from.dim; d++) {
      acc_t map[NV][VEC];
      load_row(from.lin, d, place, map);
#pragma unroll
      for (int u = 0; u < BATCH; u++) {
        const acc_t feature = widen(__ldg(rows.attr[u] + d));
#pragma unroll
        for (int n = 0; n < NV; n++) add_scaled(z[u][n], feature, map[n]);
      }
    }
#endif
  }

  DEVICE_MEMBER void scores(const Rows& rows, acc_t (&parts)[SLOTS][BATCH]) const {
    acc_t z[BATCH][NV][VEC];
    add_ends(rows, z);
#pragma unroll
    for (int u = 0; u < BATCH; u++)
#pragma unroll
      for (int n = 0; n < NV; n++)
#pragma unroll
        for (int v = 0; v < VEC; v++) {
          const acc_t bent = z[u][n][v] > 0 ? z[u][n][v] : from.slope * z[u][n][v];
          parts[n / HEAD_VECS][u] = fma(att[n][v], bent, parts[n / HEAD_VECS][u]);
        }
  }

  // The same, and which numbers are positive.
  DEVICE_MEMBER void scores(const Rows& rows, acc_t (&parts)[SLOTS][BATCH],
                            Signs& positive) const {
    acc_t z[BATCH][NV][VEC];
    add_ends(rows, z);
#pragma unroll
    for (int u = 0; u < BATCH; u++)
#pragma unroll
      for (int n = 0; n < NV; n++) {
        positive.bits[u][n] = 0;
#pragma unroll
        for (int v = 0; v < VEC; v++) {
          const acc_t bent = z[u][n][v] > 0 ? z[u][n][v] : from.slope * z[u][n][v];
          parts[n / HEAD_VECS][u] = fma(att[n][v], bent, parts[n / HEAD_VECS][u]);
          if (z[u][n][v] > 0) positive.bits[u][n] |= 1u << v;
        }
      }
  }
};

struct Forward {
  typedef Rows Batch;
  Hidden& hidden;
  scalar_t* out;
  acc_t* partial;
  acc_t sum[NV][VEC];

  template <bool FULL>
  DEVICE_MEMBER void load(Batch& rows, position_t k, const index_t (&source)[BATCH]) const {
    hidden.load<FULL>(rows, k, source);
  }
  DEVICE_MEMBER void scores(const Batch& rows, acc_t (&parts)[SLOTS][BATCH]) const {
    hidden.scores(rows, parts);
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

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    gatv2(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
          const index_t* __restrict__ perm, const long long* __restrict__ tiles,
          const scalar_t* __restrict__ x_l, const scalar_t* __restrict__ x_r,
          const scalar_t* __restrict__ att, const scalar_t* __restrict__ attr,
          const scalar_t* __restrict__ loop_attr, const scalar_t* __restrict__ lin,
          const long long* __restrict__ seed, scalar_t* __restrict__ out,
          acc_t* __restrict__ stats, acc_t* __restrict__ scores, acc_t* __restrict__ partial,
          acc_t* __restrict__ partial_stats, long long num_rows, long long num_tiles,
          long long split, long long num_loops, int heads, int channels, int dim, double slope,
          long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, num_loops};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  const Operands operands = {x_l, att, perm, attr, loop_attr, lin, dim, (acc_t)slope};
  Hidden hidden = {operands, edges, place};
  hidden.start(x_r);
  Forward op = {hidden, out, partial};
  clear(op.sum);
  attend(op, graph, edges, place, dropout, {stats, partial_stats, scores});
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gatv2_merge(const long long* __restrict__ tiles, const acc_t* __restrict__ partial,
                const acc_t* __restrict__ partial_stats, scalar_t* __restrict__ out,
                acc_t* __restrict__ stats, long long num_tiles, int heads, int channels) {
  const AttentionTables tables = {partial, partial_stats, out, stats, heads, channels};
  merge_rows<AttentionSum>(tables, tiles, num_tiles, heads * channels);
}

struct Backward {
  enum { AFTER_DROPOUT = true };  // the weights that are handed out
  struct Batch : Rows {
    Signs positive;
  };
  Hidden& hidden;
  scalar_t* grad_x_r;
  unsigned char* signs;
  acc_t *partial, *partial_mass;
  double (&att_sum)[NV][VEC];
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
  // sum_k s_k is nothing, so that where z is not positive the slope times it adds the slope's
  // share of minus what is positive.
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
    add_products(att_sum, hidden.x_r, sum);
    store_row(grad_x_r, edges.row, hidden.place, out);
  }
};

// gatv2_target — the gradient of x_r, and what the pass over the sources needs.
// Maths     grad_x_r[i] = att * g, g = sum_k s_k * leaky'(z[k]), s_k as in attend_target.cuh
//           the gradient of att gets sum_i x_r[i] * g
// Shapes    as above; grad [N, H*C]  grad_weights [E + L, H] (acc_t) or null
//           terms [E + L, 2, H] (acc_t)  signs [E + L, H * ceil(C / 8)] bytes (signs.cuh)
//           slots [blocks, H*C] (double)  partial, partial_mass, partial_delta, centre for each tile
// Mapping   as above, items in turns; then a block for each tile settles its terms, and
//           gatv2_att adds the split rows' part of the gradient of att
// Traffic   gathers E rows of x_l; terms and signs out once (terms twice through the L2)
// Numerics  scores are those of the forward pass, bit for bit
// Limits    as above
extern "C" __global__ void __launch_bounds__(THREADS)
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
  double att_sum[NV][VEC] = {};
  for (Turns turn; turn.first < num_rows + num_tiles; turn.next()) {
    const Edges edges(graph, turn.item);
    if (!any_group(edges.row >= 0)) continue;
    Hidden hidden = {operands, edges, place};
    hidden.start(x_r);
    Backward op = {hidden, grad_x_r, signs, partial, partial_mass, att_sum};
    load_row(grad, edges.row, place, op.grad);
    clear(op.sum), clear(op.mass);
    attend_target(op, graph, edges, place, dropout,
                  {stats, grad_weights, terms, partial_delta, centre});
  }
  store_slot(slots, place, att_sum);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gatv2_settle(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                 const long long* __restrict__ tiles, const acc_t* __restrict__ delta,
                 acc_t* __restrict__ terms, long long num_rows, long long num_tiles,
                 long long split, long long num_loops, int heads, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, num_loops};
  settle_tile(graph, terms, delta, heads, (acc_t)keep);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gatv2_target_merge(const long long* __restrict__ tiles, acc_t* partial,
                       const acc_t* __restrict__ partial_mass, const acc_t* __restrict__ centre,
                       const acc_t* __restrict__ delta, const scalar_t* __restrict__ att,
                       scalar_t* __restrict__ grad_x_r, long long num_tiles, int heads,
                       int channels, double slope) {
  const TargetMerge tables = {tiles, partial,  partial_mass, centre,   delta,
                              att,   grad_x_r, heads,        channels, 1 - (acc_t)slope};
  merge_rows<TargetSum>(tables, tiles, num_tiles, heads * channels);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gatv2_att(const long long* __restrict__ tiles, const scalar_t* __restrict__ x_r,
              const acc_t* __restrict__ partial, double* __restrict__ slots, long long num_tiles,
              int heads, int channels) {
  const Place place(heads, channels);
  double att_sum[NV][VEC] = {};
  for (Turns turn; turn.item < num_tiles; turn.next()) {
    if (tiles[4 * turn.item + 3] == 0) continue;
    acc_t x[NV][VEC], g[NV][VEC] = {};
    load_row(x_r, tiles[4 * turn.item], place, x);
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int v = 0; v < VEC; v++)
        if (place.inside(n)) g[n][v] = partial[turn.item * place.width + place.feature(n) + v];
    add_products(att_sum, x, g);
  }
  store_slot(slots, place, att_sum);
}

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

// gatv2_source — the gradient of x_l.
// Maths     grad_x_l[j] = sum_k weight_k * grad[idx[k]] + att * g, g = sum_k s_k * leaky'(z[k])
//           over the edges k from source j; the gradient of att gets sum_j x_l[j] * g
// Shapes    grad [N, H*C]  x_l, grad_x_l [S, H*C]  terms, signs as above  slots [blocks, H*C]
//           rows and tiles by source, perm the positions by target; partial [T, H*C] (acc_t)
// Mapping   as above, items in turns
// Traffic   gathers E rows of grad, of terms and of signs
// Numerics  acc_t sums in edge order, tiles merged in order by spmm_merge
// Limits    as above
extern "C" __global__ void __launch_bounds__(THREADS)
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
  double att_sum[NV][VEC] = {};
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
    add_products(att_sum, x, op.rise);
    if (edges.part >= 0)
      store_partial(partial, edges.part, place, op.sum);
    else
      store_row(grad_x_l, edges.row, place, op.sum);
  }
  store_slot(slots, place, att_sum);
}
