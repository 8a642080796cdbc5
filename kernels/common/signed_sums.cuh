// Sums over the edges of a row, by the signs of their hidden values (signs.cuh).
//
// A word of signs has bits of several lanes. Where these have 4 or 8 bits each, lanes trade halves of
// words, then bytes, until each has those of its own channels, of an edge at most 4 in a byte: one
// instruction makes predicates of them. Else each edge's word is handed to all lanes.
#pragma once
#include "signs.cuh"

#define BY_BYTES (WORD_LANES * VEC == 32 && (VEC == 4 || VEC == 8) && BATCH >= 4)
#define TURNS (VEC == 4 && WORD_SPREAD == 1 ? 2 : 1)  // words that edges alternate in

// Where the edges are whose words a lane has, given where its own are.
DEVICE void find_words(const Edges& edges, const index_t* idx, const index_t* perm, position_t k,
                       const Place& place, const position_t (&own)[BATCH],
                       position_t (&to)[BATCH]) {
#pragma unroll
  for (int i = 0; i < WORD_OWN; i++)
    to[i] = WORD_LANES == HEAD_LANES ? own[i] : edges.find(idx, perm, k + word_edge(i, place));
}

// Which channels of the lane are positive, of each edge of a batch.
struct LaneSigns {
  unsigned words[NV][WORD_OWN][2];  // of an edge, or of 4 channels, the second; or the edge's word
  int first;                        // the lane's first bit in that

  DEVICE_MEMBER LaneSigns(const SignWords& from, const Place& place) {
    const int sub = place.sub, far = WORD_LANES / 2, near = WORD_LANES / 4;
    const unsigned halves = sub & far ? 0x3276 : 0x5410, bytes = sub & near ? 0x3715 : 0x6240;
    first = sub % WORD_LANES * VEC;
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int i = 0; i < WORD_OWN; i++) {
        words[n][i][0] = from.words[n][i];
        if (!BY_BYTES) continue;
        const unsigned word = trade(trade(from.words[n][i], far, halves), near, bytes);
#pragma unroll
        for (int t = 0; t < 2; t++) {
          const unsigned some = TURNS > 1 ? __shfl_sync(ALL_LANES, word, t, TURNS) : word;
          words[n][i][t] = from_second(some, VEC == 8 ? 4 * t : first & 4);
        }
      }
  }
  // sum += value where an edge's channels are positive
  DEVICE_MEMBER void add_where(acc_t (&sum)[VEC], acc_t value, int u, int n) const {
    const int lane = u / WORD_OWN;
    const unsigned(&own)[2] = words[n][u % WORD_OWN];
    unsigned word = own[0];
    if (!BY_BYTES && WORD_LANES > 1)
      word = __shfl_sync(ALL_LANES, word, lane * WORD_SPREAD, WORD_LANES);
    word >>= first;
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      const unsigned four = own[VEC == 8 ? v / 4 : lane % TURNS] >> lane / TURNS * 8;
      if (BY_BYTES ? four & 2u << v % 4 : word >> v & 1) sum[v] += value;
    }
  }

 private:
  // Of two lanes' words the halves, or bytes, that are this lane's.
  DEVICE_MEMBER static unsigned trade(unsigned word, int offset, unsigned select) {
    return __byte_perm(word, __shfl_xor_sync(ALL_LANES, word, offset), select);
  }
  // Rotates a bit to where the second was: a predicate of the first takes two instructions.
  DEVICE_MEMBER static unsigned from_second(unsigned word, int bit) {
    return __funnelshift_l(word, word, 1 - bit);
  }
};

// The sums of what the edges of a row have: where hidden values are positive, and everywhere.
struct RisingSums {
  acc_t rise[NV][VEC], all[SLOTS];

  DEVICE_MEMBER void clear() {
    ::clear(rise);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) all[s] = 0;
  }
  DEVICE_MEMBER void add(const acc_t (&slopes)[SLOTS][BATCH], const LaneSigns& positive) {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
#pragma unroll
      for (int i = 0; i < OWN; i++) all[s] += slopes[s][i];
#pragma unroll
      for (int u = 0; u < BATCH; u++) {
        const acc_t slope = of_edge(slopes[s], u);
#pragma unroll
        for (int n = s * HEAD_VECS; n < (s + 1) * HEAD_VECS; n++)
          positive.add_where(rise[n], slope, u, n);
      }
    }
  }
  DEVICE_MEMBER void finish() {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) all[s] = sum_over_edges(all[s]);
  }
};
