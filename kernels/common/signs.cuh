// Which hidden values of an edge are positive: a bit for each channel, ceil(C / 8) bytes a head.
#pragma once
#include "edges.cuh"

#define WORD_LANES (HEAD_LANES * VEC < 32 ? HEAD_LANES : 32 / VEC)  // that share 32 bits
#define WORD_SPREAD (WORD_LANES > BATCH ? WORD_LANES / BATCH : 1)
#define WORD_OWN (BATCH > WORD_LANES ? BATCH / WORD_LANES : 1)

#define FOURS (WORD_LANES * VEC == 32 && (VEC == 4 || VEC == 8) && (BATCH == 4 || BATCH == 8))
#define EACH_FOUR (FOURS ? BATCH / 4 : BATCH)  // words of four edges, a byte each, or of one

DEVICE unsigned top_bit_into(unsigned bits, float value) {
  return __funnelshift_l(__float_as_uint(value), bits, 1);
}
DEVICE unsigned top_bit_into(unsigned bits, double value) {
  return __funnelshift_l(__double2hiint(value), bits, 1);
}

// The signs of a lane's numbers of a batch of edges: VEC bits an edge, in a byte of a word of four
// edges, or in a word of its own.
struct Signs {
  unsigned words[EACH_FOUR][NV];

  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int i = 0; i < EACH_FOUR; i++)
#pragma unroll
      for (int n = 0; n < NV; n++) words[i][n] = 0;
  }
  // Takes the signs of an edge's numbers: of the last edge first.
  DEVICE_MEMBER void add(int u, int n, const acc_t (&values)[VEC]) {
    unsigned& word = words[u % EACH_FOUR][n];
    if (FOURS && VEC == 4) word <<= 4;
#pragma unroll
    for (int v = VEC - 1; v >= 0; v--) word = top_bit_into(word, values[v]);
  }
};

DEVICE int sign_bytes(const Place& place) { return (place.channels + 7) / 8; }

// Which edge of a batch a lane has the words of.
DEVICE int word_edge(int i, const Place& place) {
  return place.sub % WORD_LANES / WORD_SPREAD * WORD_OWN + i;
}

// Gives half of a word's bytes to the lane `offset` off for half of its: of each edge that is kept,
// the byte of the lower lane first.
DEVICE unsigned swap_bytes(unsigned word, int sub, int offset) {
  const unsigned other = __shfl_xor_sync(ALL_LANES, word, offset);
  return __byte_perm(word, other, sub & offset ? 0x3726 : 0x5140);
}

// Collects 32 bits of an edge in each of the lanes that share them.
DEVICE void collect(unsigned (&words)[WORD_OWN], const Signs& signs, int n, int sub) {
#if BATCH == 4 || BATCH == 8
  if (FOURS && VEC == 8) {
#pragma unroll
    for (int i = 0; i < WORD_OWN; i++)
      words[i] = swap_bytes(swap_bytes(signs.words[i][n], sub, 2), sub, 1);
    return;
  }
  if (FOURS) {
    const int own = sub & 1, other = 1 - own;
    const unsigned kept = EACH_FOUR == 1 || !own ? signs.words[0][n] : signs.words[EACH_FOUR - 1][n];
    const unsigned given = EACH_FOUR == 1 || own ? signs.words[0][n] : signs.words[EACH_FOUR - 1][n];
    const unsigned got = __shfl_xor_sync(ALL_LANES, given, 1);
    words[0] = swap_bytes(swap_bytes(kept << 4 * own | got << 4 * other, sub, 4), sub, 2);
    return;
  }
#endif
  unsigned parts[BATCH];
#pragma unroll
  for (int u = 0; u < BATCH; u++) parts[u] = signs.words[u % EACH_FOUR][n] << sub * VEC;
  combine<WORD_LANES>(parts, sub, Or());
#pragma unroll
  for (int i = 0; i < WORD_OWN; i++) words[i] = parts[i];
}

DEVICE void store_signs(unsigned char* table, const Edges& edges, position_t k, const Place& place,
                        const Signs& signs) {
  const int sub = place.sub % WORD_LANES, bytes = sign_bytes(place);
#pragma unroll
  for (int n = 0; n < NV; n++) {
    unsigned words[WORD_OWN];
    collect(words, signs, n, sub);
    const int first = place.channel(n) / 32 * 4;
    const bool writes = sub % WORD_SPREAD == 0 && place.has(n / HEAD_VECS) && (FILLED || first < bytes);
#pragma unroll
    for (int i = 0; i < WORD_OWN; i++) {
      const position_t edge = k + word_edge(i, place);
      unsigned char* to = in_row(table, edges.position(edge), place.heads * bytes,
                                 place.head_of(n / HEAD_VECS) * bytes + first);
      if (!writes || edge >= edges.stop) continue;
      if (bytes % 4 == 0) {
        *(unsigned*)to = words[i];
      } else {
        for (int b = 0; b < 4 && first + b < bytes; b++) to[b] = words[i] >> 8 * b;
      }
    }
  }
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
};
