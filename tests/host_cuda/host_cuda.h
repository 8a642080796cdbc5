// How kernels that are compiled for the CPU meet the driver that runs them.
#pragma once

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct uint3 {
  unsigned x, y, z;
};
// Of the fiber that runs now.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace host {

enum Op { SYNC, SHUFFLE, BALLOT, ANY, ALL, ADD, MIN, MAX, UMIN, UMAX, AND, OR, XOR, MATCH_ANY };
typedef unsigned long long Word;

struct Site {
  const char *what, *file;
  int line;
};

struct Kernel {
  const char* name;
  void (*run)(void** params);
  char *shared, *shared_end;
};

// Ends the launch with an error.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Waits for the lanes of the mask; returns what the operation gives this lane.
Word meet(Op op, unsigned mask, Word value, int source, Site site);
// Waits for the threads of the block; returns how many of them gave a true predicate.
int meet_block(Op op, bool predicate, Site site);
int lane();
// Runs all blocks; returns an error, or null.
const char* launch(const Kernel& kernel, unsigned x, unsigned y, unsigned threads, void** params,
                   Word seed);

}  // namespace host
