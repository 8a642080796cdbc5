// Who shares the gradient of an extremum.
//
// TIES says who: 0 "even", every edge that attains the result, and the buffer of zeros that
// scatter_reduce starts from as one more where the result is zero; 1 "first", the first edge; 2
// "exact", every edge that attains the result. The forward pass leaves a mark for each feature of a
// row: where COUNTS, how many share; else the place in the row of the only edge that shares, or 1 - n
// where n share. None share where "even" finds NaN, which no number equals.
#pragma once
#include "bits.cuh"
#include "pairs.cuh"

#define EVEN 0
#define FIRST 1
// Numbers of 16 bits tie often, and a row of results has no more bytes than one of places.
#define COUNTS (TIES != FIRST && SCALAR >= 2)
#define NONE ((place_t)(COUNTS ? 0 : 1ull << (8 * sizeof(place_t) - 1)))

DEVICE bool is_finite(acc_t value) { return value - value == 0; }

// Whether two numbers are equal, as the forward pass compares them.
DEVICE bool same(acc_t a, acc_t b) {
#if PAIRS && SCALAR == 3
  const unsigned left = __float_as_uint(a), right = __float_as_uint(b);
  return (left == right && a == a) || !((left | right) << 1);
#else
  return a == b;
#endif
}

DEVICE bool attains(acc_t v, acc_t best) {
  return same(v, best) || (TIES != EVEN && v != v && best != best);
}

// How many share.
DEVICE int sharers(int mark) {
  if (COUNTS) return mark;
  return mark >= 0 ? 1 : mark == (int)NONE ? 0 : 1 - mark;
}

// What is handed on of a part of a row, of whose result more may be known later.
DEVICE int mark_in_tile(int place, int count) {
  if (COUNTS) return count;
  return TIES != FIRST && count > 1 ? 1 - count : place;
}

// The mark of a row's result, of which `count` edges are known to attain it, the first at `place`.
DEVICE int mark_of(acc_t value, int place, int count) {
  if (TIES == EVEN && value != value) return (int)NONE;
  return mark_in_tile(place, count + (TIES == EVEN && same(value, 0)));
}

// What each sharer gets of a gradient.
DEVICE acc_t share_of(acc_t grad, int mark) {
  return !COUNTS && mark >= 0 ? grad : widen(narrow(grad / (acc_t)sharers(mark)));
}

// N marks of a row, of one access or more, still together.
template <int N, class T = place_t> struct Marks {
  static constexpr int BITS_EACH = 8 * sizeof(T), PER = 32 / BITS_EACH;
  static constexpr int WORDS = N < PER ? 1 : N / PER;
  static constexpr unsigned ONES = ~0u / ((unsigned)(1ull << BITS_EACH) - 1u);  // 1 in each
  static constexpr unsigned SIGNS = ONES << (BITS_EACH - 1);
  unsigned words[WORDS];

  // No place has the greatest number.
  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int w = 0; w < WORDS; w++) words[w] = ~SIGNS;
  }
  DEVICE_MEMBER void load(const T* at) {
    clear();
    load_bytes<N * sizeof(T)>(at, words);
  }
  DEVICE_MEMBER bool is(int v, int place) const {
    const unsigned all = BITS_EACH == 32 ? ~0u : (1u << (BITS_EACH & 31)) - 1u;
    return !((words[v / PER] ^ place * ONES) & all << v % PER * BITS_EACH);
  }
  DEVICE_MEMBER bool any_shared() const {
    unsigned signs = 0;
#pragma unroll
    for (int w = 0; w < WORDS; w++) signs |= words[w];
    return signs & SIGNS;
  }

  // Sets of marks: a bit for each. They fit while a mark's bits are no fewer than the words.
  DEVICE_MEMBER unsigned at(int place) const {
    unsigned set = 0;
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      const unsigned other = words[w] ^ place * ONES;  // zero where it is the place
      set |= ~(((other & ~SIGNS) + ~SIGNS) | other | ~SIGNS) >> w;
    }
    return N < PER ? set & ((1u << (N * BITS_EACH & 31)) - 1u) : set;
  }
  DEVICE_MEMBER unsigned shared() const {
    unsigned set = 0;
#pragma unroll
    for (int w = 0; w < WORDS; w++) set |= (words[w] & SIGNS) >> w;
    return set;
  }
  // Which mark one of the bits stands for.
  static DEVICE_MEMBER int number(unsigned bit) {
    return (BITS_EACH - 1 - bit % BITS_EACH) * PER + bit / BITS_EACH;
  }
};
