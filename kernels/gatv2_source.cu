// gatv2_source — the gradient of x_l.
// Maths     grad_x_l[j] = sums[j] + att * g, g = sum_k s_k * leaky'(z[k]) over the edges k from j
//           the gradient of att gets sum_j x_l[j] * g
// Shapes    x_l, grad_x_l [S, H*C]  terms, signs as in gatv2_target.cu  slots [blocks, H*C] (double)
//           sums [S, H*C] (acc_t), from attention_values; may be grad_x_l
//           rows and tiles by source, perm the positions by target; partial [T, H*C] (acc_t): as
//           sums, for each tile, and g added
// Mapping   as in gatv2.cu, items in turns
// Traffic   gathers E rows of terms and of signs; sums, x_l and grad_x_l once
// Numerics  acc_t sums in edge order, tiles merged in order by spmm_merge
// Limits    VEC divides C
#include "common/signed_sums.cuh"
#include "common/slots.cuh"

// Loads what the kernel may write, so not by way of the cache for constants.
DEVICE void load_sums(const acc_t* table, long long row, const Place& place, acc_t (&to)[NV][VEC]) {
  typedef Accesses<VEC * sizeof(acc_t)> Of;
#pragma unroll
  for (int n = 0; n < NV; n++)
#pragma unroll
    for (int b = 0; b < VEC * (int)sizeof(acc_t); b += Of::EACH) {
      Of::bits some = {};
      const acc_t* at = in_row(table, row, place.width, place.feature(n));
      if (place.inside(n)) some = *(const Of::bits*)((const char*)at + b);
      memcpy((char*)to[n] + b, &some, Of::EACH);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    gatv2_source(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                 const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                 const acc_t* __restrict__ terms, const unsigned char* __restrict__ signs,
                 const scalar_t* __restrict__ x_l, const scalar_t* __restrict__ att,
                 const acc_t* sums, scalar_t* grad_x_l, double* __restrict__ slots,
                 acc_t* partial, long long num_rows, long long num_tiles, long long split,
                 long long num_loops, int heads, int channels, double slope) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, num_loops};
  const Place place(heads, channels);
  ParameterSums att_sums;
  att_sums.clear();
  for (Turns turn; turn.first < num_rows + num_tiles; turn.next()) {
    const Edges edges(graph, turn.item);
    if (!any_group(edges.row >= 0)) continue;
    RisingSums signed_sums;
    signed_sums.clear();
    for (position_t k = edges.begin; any_group(k < edges.stop); k += BATCH) {
      position_t own[BATCH], positions[BATCH];
      acc_t slopes[SLOTS][BATCH];
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        own[i] = edges.find(idx, perm, k + place.own_edge(i));
#pragma unroll
        for (int s = 0; s < SLOTS; s++) slopes[s][i] = load_number(terms, own[i], place, s);
      }
      find_words(edges, idx, perm, k, place, own, positions);
      SignWords words;
      words.load(signs, positions, place);
      signed_sums.add(slopes, LaneSigns(words, place));
    }
    signed_sums.finish();
    if (edges.row < 0) continue;
    acc_t vector[NV][VEC], x[NV][VEC], sum[NV][VEC];
    load_row(att, 0, place, vector);
    load_row(x_l, edges.row, place, x);
    load_sums(edges.part >= 0 ? partial : sums, edges.part >= 0 ? edges.part : edges.row, place, sum);
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int v = 0; v < VEC; v++) {
        acc_t& rise = signed_sums.rise[n][v];
        rise = (acc_t)slope * signed_sums.all[n / HEAD_VECS] + (1 - (acc_t)slope) * rise;
        sum[n][v] = fma(vector[n][v], rise, sum[n][v]);
      }
    att_sums.add(x, signed_sums.rise);
    store_sums(grad_x_l, partial, edges, place, sum);
  }
  att_sums.store(slots, place);
}
