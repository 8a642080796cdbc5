// Which hidden values of an edge are positive: a bit for each channel, ceil(C / 8) bytes a head.
#pragma once
#include "edges.cuh"

#define WORD_LANES (HEAD_LANES * VEC < 32 ? HEAD_LANES : 32 / VEC)  // that share 32 bits
#define WORD_SPREAD (WORD_LANES > BATCH ? WORD_LANES / BATCH : 1)
#define WORD_OWN (BATCH > WORD_LANES ? BATCH / WORD_LANES : 1)

struct Signs {
  unsigned bits[BATCH][NV];  // VEC bits each
};

DEVICE long long sign_bytes(const Place& place) { return (place.channels + 7) / 8; }

DEVICE void store_signs(unsigned char* signs, const Edges& edges, position_t k, const Place& place,
                        const Signs& positive) {
  const int sub = place.sub % WORD_LANES;
#pragma unroll
  for (int n = 0; n < NV; n++) {
    unsigned words[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; u++) words[u] = positive.bits[u][n] << sub * VEC;
    combine<WORD_LANES>(words, sub, Or());
    const long long bytes = sign_bytes(place), first = place.channel(n) / 32 * 4;
    if (sub % WORD_SPREAD || !place.has(n / HEAD_VECS) || first >= bytes) continue;
#pragma unroll
    for (int i = 0; i < WORD_OWN; i++) {
      const position_t edge = k + sub / WORD_SPREAD * WORD_OWN + i;
      if (edge >= edges.stop) continue;
      const long long head = edges.position(edge) * place.heads + place.head_of(n / HEAD_VECS);
      unsigned char* to = signs + head * bytes + first;
      if (bytes % 4 == 0) {
        *(unsigned*)to = words[i];
      } else {
        for (int b = 0; b < 4 && first + b < bytes; b++) to[b] = words[i] >> 8 * b;
      }
    }
  }
}

// The bits of the lane's channels of an edge.
DEVICE unsigned load_signs(const unsigned char* signs, long long position, int n,
                           const Place& place) {
  const long long head = position * place.heads + place.head_of(n / HEAD_VECS);
  const int channel = place.channel(n);
  return __ldg(signs + head * sign_bytes(place) + channel / 8) >> channel % 8;
}

// sum += value where the bits say so
DEVICE void add_where(acc_t (&sum)[VEC], unsigned bits, acc_t value) {
#pragma unroll
  for (int v = 0; v < VEC; v++)
    if (bits >> v & 1) sum[v] += value;
}
