// Which hidden values of an edge are positive: a bit for each channel, ceil(C / 8) bytes a head.
#pragma once
#include "edges.cuh"

#define WORD_LANES (HEAD_LANES * VEC < 32 ? HEAD_LANES : 32 / VEC)  // that share 32 bits
#define WORD_SPREAD (WORD_LANES > BATCH ? WORD_LANES / BATCH : 1)
#define WORD_OWN (BATCH > WORD_LANES ? BATCH / WORD_LANES : 1)

struct Signs {
  unsigned bits[BATCH][NV];  // VEC bits each
};

DEVICE int sign_bytes(const Place& place) { return (place.channels + 7) / 8; }

DEVICE void store_signs(unsigned char* signs, const Edges& edges, position_t k, const Place& place,
                        const Signs& positive) {
  const int sub = place.sub % WORD_LANES;
#pragma unroll
  for (int n = 0; n < NV; n++) {
    unsigned words[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; u++) words[u] = positive.bits[u][n] << sub * VEC;
    combine<WORD_LANES>(words, sub, Or());
    const int bytes = sign_bytes(place), first = place.channel(n) / 32 * 4;
    if (sub % WORD_SPREAD || !place.has(n / HEAD_VECS) || (!FILLED && first >= bytes)) continue;
#pragma unroll
    for (int i = 0; i < WORD_OWN; i++) {
      const position_t edge = k + sub / WORD_SPREAD * WORD_OWN + i;
      if (edge >= edges.stop) continue;
      unsigned char* to = in_row(signs, edges.position(edge), place.heads * bytes,
                                 place.head_of(n / HEAD_VECS) * bytes + first);
      if (bytes % 4 == 0) {
        *(unsigned*)to = words[i];
      } else {
        for (int b = 0; b < 4 && first + b < bytes; b++) to[b] = words[i] >> 8 * b;
      }
    }
  }
}

// Which edge of a batch a lane has the words of.
DEVICE int word_edge(int i, const Place& place) {
  return place.sub % WORD_LANES / WORD_SPREAD * WORD_OWN + i;
}

// The signs of a batch of edges, 32 bits of an edge in one lane of those that share them.
struct SignWords {
  unsigned words[NV][WORD_OWN];

  DEVICE_MEMBER void load(const unsigned char* signs, const position_t (&positions)[BATCH],
                          const Place& place) {
    const int bytes = sign_bytes(place);
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int i = 0; i < WORD_OWN; i++) {
        const int first = place.channel(n) / 32 * 4;
        const bool exists = positions[i] != NOWHERE && place.has(n / HEAD_VECS) && (FILLED || first < bytes);
        const unsigned char* from = in_row(signs, positions[i], place.heads * bytes,
                                           place.head_of(n / HEAD_VECS) * bytes + first);
        words[n][i] = 0;
        if (bytes % 4 == 0) {
          words[n][i] = exists ? __ldg((const unsigned*)from) : 0;
        } else if (exists) {
          for (int b = 0; b < 4 && first + b < bytes; b++)
            words[n][i] |= (unsigned)__ldg(from + b) << 8 * b;
        }
      }
  }
  // The bits of the lane's channels of an edge.
  DEVICE_MEMBER unsigned of(int u, int n, const Place& place) const {
    const int own = u % WORD_OWN, lane = u / WORD_OWN * WORD_SPREAD;
    const unsigned word = WORD_LANES == 1 ? words[n][own]
                                          : __shfl_sync(ALL_LANES, words[n][own], lane, WORD_LANES);
    return word >> place.sub % WORD_LANES * VEC;
  }
};

// sum += value where the bits say so
DEVICE void add_where(acc_t (&sum)[VEC], unsigned bits, acc_t value) {
#pragma unroll
  for (int v = 0; v < VEC; v++)
    if (bits >> v & 1) sum[v] += value;
}

// The sums of what the edges of a row have: where hidden values are positive, and everywhere.
struct SignedSums {
  acc_t rise[NV][VEC], all[SLOTS];

  DEVICE_MEMBER void clear() {
    ::clear(rise);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) all[s] = 0;
  }
  DEVICE_MEMBER void add(const acc_t (&slopes)[SLOTS][BATCH], const SignWords& positive,
                         const Place& place) {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
#pragma unroll
      for (int i = 0; i < OWN; i++) all[s] += slopes[s][i];
#pragma unroll
      for (int u = 0; u < BATCH; u++) {
        const acc_t slope = of_edge(slopes[s], u);
#pragma unroll
        for (int n = s * HEAD_VECS; n < (s + 1) * HEAD_VECS; n++)
          add_where(rise[n], positive.of(u, n, place), slope);
      }
    }
  }
  DEVICE_MEMBER void finish() {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) all[s] = sum_over_edges(all[s]);
  }
};
