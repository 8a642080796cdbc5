// Runs the blocks of a launch on one CPU thread, each thread of a block as a fiber.
//
// Blocks run one after another. In a block one fiber runs until it waits or ends; then another that
// can go on is chosen. All orders come from the seed: of blocks, of warps and of lanes. Each block
// draws how warps and lanes are chosen: at random, or by a rank that lets one run as far as it can.
// Where no fiber can go on and some have not ended, the launch ends with an error that says why.
#include "fiber.h"
#include "host_cuda.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace host {
namespace {

enum State { READY, IN_WARP, IN_BLOCK, ENDED };

struct Fiber {
  Context context;
  char* stack;
  void* fake_stack;
  uint3 index;
  State state;
  // What it waits for, and what it is given.
  Op op;
  unsigned mask;
  int source;
  Word value;
  Site site;
};

struct Warp {
  unsigned ready, waiting;  // lanes
  unsigned char order[32];  // lanes by rank
};

struct Random {
  Word state;
  unsigned operator()(unsigned n) {  // below n
    Word z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (z >> 32) * n >> 32;
  }
  template <class T> void shuffle(T* items, unsigned n) {
    for (unsigned i = n; i > 1; i--) std::swap(items[i - 1], items[(*this)(i)]);
  }
};

std::mutex one_at_a_time;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
Context scheduler;
Random draw;
const Kernel* kernel;
void** arguments;
Fiber* self;
unsigned threads, in_block, ended;
bool failed;
std::string error;
void* main_fake_stack;  // for AddressSanitizer, as what follows
const void* main_stack;
size_t main_size;

unsigned number(const Fiber& fiber) { return &fiber - fibers.data(); }

void to_scheduler() {
  Fiber& fiber = *self;
  LEAVE(&fiber.fake_stack, main_stack, main_size);
  host_switch(&fiber.context, &scheduler);
  ARRIVE(fiber.fake_stack, &main_stack, &main_size);
}

void resume(Fiber& fiber) {
  self = &fiber;
  threadIdx = fiber.index;
  LEAVE(&main_fake_stack, fiber.stack, STACK);
  host_switch(&scheduler, &fiber.context);
  ARRIVE(main_fake_stack, nullptr, nullptr);
}

void make_ready(Fiber& fiber) {
  const unsigned n = number(fiber);
  fiber.state = READY;
  warps[n / 32].ready |= 1u << n % 32;
  warps[n / 32].waiting &= ~(1u << n % 32);
}

void wait(State state) {
  const unsigned n = number(*self);
  self->state = state;
  warps[n / 32].ready &= ~(1u << n % 32);
  if (state == IN_WARP) warps[n / 32].waiting |= 1u << n % 32;
}

std::string print(const char* text, ...) {
  char buffer[512];
  va_list args;
  va_start(args, text);
  vsnprintf(buffer, sizeof(buffer), text, args);
  va_end(args);
  return buffer;
}

std::string place(const Site& site) {
  const char* slash = strrchr(site.file, '/');
  return print("%s (%s:%d)", site.what, slash ? slash + 1 : site.file, site.line);
}

void report(unsigned thread, const std::string& what) {
  failed = true;
  error = print("%s, block (%u, %u), warp %u, lane %u: ", kernel->name, blockIdx.x, blockIdx.y,
                thread / 32, thread % 32);
  error += what;
}

[[noreturn]] void fail_with(const std::string& what) {
  report(number(*self), what);
  to_scheduler();
  abort();
}

// Lets the threads go that wait for the block, if all others have ended: as the hardware does.
void release_block() {
  if (!in_block || in_block + ended < threads) return;
  const Fiber* first = nullptr;
  int count = 0;
  for (Fiber& fiber : fibers) {
    if (fiber.state != IN_BLOCK) continue;
    if (!first) first = &fiber;
    if (fiber.op != first->op || fiber.site.line != first->site.line) {
      report(number(fiber), "waits at " + place(fiber.site) + ", but others of its block at " +
                                place(first->site));
      return;
    }
    count += fiber.value != 0;
  }
  for (Fiber& fiber : fibers)
    if (fiber.state == IN_BLOCK) make_ready(fiber), fiber.value = count;
  in_block = 0;
}

void body() {
  ARRIVE(nullptr, &main_stack, &main_size);
  for (;;) {  // once for each block
    kernel->run(arguments);
    wait(ENDED);
    ended++;
    release_block();
    to_scheduler();
  }
}

void make_fibers(unsigned count) {
  static char* stacks = nullptr;
  static unsigned made = 0;
  const long page = sysconf(_SC_PAGESIZE);  // no access below each stack
  if (made < count) {
    CLEAN(stacks, (size_t)made * (STACK + page));
    if (stacks) munmap(stacks, (size_t)made * (STACK + page));
    stacks = (char*)mmap(nullptr, (size_t)count * (STACK + page), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) abort();
    made = count;
    for (unsigned i = 0; i < count; i++) mprotect(stacks + i * (STACK + page), page, PROT_NONE);
  }
  CLEAN(stacks, (size_t)made * (STACK + page));  // of what an error left there
  fibers.assign(count, Fiber());
  warps.assign((count + 31) / 32, Warp());
  for (unsigned i = 0; i < count; i++) {
    fibers[i].stack = stacks + i * (STACK + page) + page;
    fibers[i].index = {i, 0, 0};
    prepare(fibers[i].context, fibers[i].stack, body);
  }
}

__attribute__((no_sanitize("address"))) void poison_shared() {
  for (volatile char* at = kernel->shared; at < kernel->shared_end; at++) *at = (char)0xff;
}

// What became of a lane that others wait for.
std::string fate(unsigned thread) {
  if (thread >= threads) return "does not exist";
  const Fiber& fiber = fibers[thread];
  if (fiber.state == ENDED) return "has ended";
  const std::string with = print(" with mask 0x%08x", fiber.mask);
  return "waits at " + place(fiber.site) + (fiber.state == IN_WARP ? with : "");
}

// Says which lanes one of the waiting threads waits for.
void explain() {
  for (const Fiber& fiber : fibers) {
    if (fiber.state != IN_WARP) continue;
    const unsigned first = number(fiber) / 32 * 32;
    std::string missing, why;
    for (unsigned l = 0; l < 32; l++) {
      const Fiber* other = first + l < threads ? &fibers[first + l] : nullptr;
      if (!(fiber.mask >> l & 1)) continue;
      if (other && other->state == IN_WARP && other->mask == fiber.mask) continue;
      missing += (missing.empty() ? "" : ", ") + std::to_string(l);
      if (why.empty()) why = print(": lane %u ", l) + fate(first + l);
    }
    const std::string with = print(" with mask 0x%08x waits for lanes ", fiber.mask);
    return report(number(fiber), place(fiber.site) + with + missing + why);
  }
  report(0, "no thread can go on");
}

void run_block() {
  poison_shared();
  in_block = ended = 0;
  const unsigned count = warps.size();
  unsigned char order[32];  // warps by rank
  for (unsigned w = 0; w < count; w++) order[w] = w;
  draw.shuffle(order, count);
  for (unsigned w = 0; w < count; w++) {
    const unsigned lanes = threads - 32 * w;
    warps[w].ready = lanes < 32 ? (1u << lanes) - 1 : ~0u;
    warps[w].waiting = 0;
    for (int l = 0; l < 32; l++) warps[w].order[l] = l;
    draw.shuffle(warps[w].order, 32);
  }
  for (Fiber& fiber : fibers) fiber.state = READY;
  const bool ranked_warps = draw(2), ranked_lanes = draw(2);
  while (ended < threads && !failed) {
    unsigned choices = 0, candidates[32];
    for (unsigned w = 0; w < count; w++)
      if (warps[order[w]].ready) candidates[choices++] = order[w];
    if (!choices) return explain();
    const unsigned w = candidates[ranked_warps ? 0 : draw(choices)];
    unsigned ready = warps[w].ready, lane = 0;
    if (ranked_lanes) {
      unsigned rank = 0;
      while (!(ready >> warps[w].order[rank] & 1)) rank++;
      lane = warps[w].order[rank];
    } else {
      for (unsigned skip = draw(__builtin_popcount(ready)); skip; skip--) ready &= ready - 1;
      lane = __builtin_ctz(ready);
    }
    resume(fibers[32 * w + lane]);
  }
}

Word fold(Op op, Word a, Word b) {
  switch (op) {
    case ADD: return (unsigned)(a + b);
    case MIN: return (int)a < (int)b ? a : b;
    case MAX: return (int)a > (int)b ? a : b;
    case UMIN: return (unsigned)a < (unsigned)b ? a : b;
    case UMAX: return (unsigned)a > (unsigned)b ? a : b;
    case AND: return a & b;
    case OR: return a | b;
    case XOR: return a ^ b;
    default: return 0;
  }
}

// Gives each lane of the mask its result: all of them have arrived.
void complete(Op op, unsigned mask, Fiber* lanes) {
  Word given[32] = {}, result = 0;
  unsigned ballot = 0;
  bool first = true;
  for (unsigned l = 0; l < 32; l++) {
    if (!(mask >> l & 1)) continue;
    given[l] = lanes[l].value;
    if (given[l]) ballot |= 1u << l;
    result = first ? given[l] : fold(op, result, given[l]);
    first = false;
  }
  if (op == BALLOT) result = ballot;
  if (op == ANY) result = ballot != 0;
  if (op == ALL) result = ballot == mask;
  for (unsigned l = 0; l < 32; l++) {
    if (!(mask >> l & 1)) continue;
    lanes[l].value = op == SHUFFLE ? given[lanes[l].source] : result;
    if (op == MATCH_ANY) {
      lanes[l].value = 0;
      for (unsigned m = 0; m < 32; m++)
        if ((mask >> m & 1) && given[m] == given[l]) lanes[l].value |= 1u << m;
    }
    make_ready(lanes[l]);
  }
}

}  // namespace

void fail(const char* text, ...) {
  char buffer[512];
  va_list args;
  va_start(args, text);
  vsnprintf(buffer, sizeof(buffer), text, args);
  va_end(args);
  fail_with(buffer);
}

int lane() { return number(*self) % 32; }

Word meet(Op op, unsigned mask, Word value, int source, Site site) {
  const unsigned n = number(*self), lane = n % 32;
  Fiber* lanes = &fibers[n - lane];
  if (!(mask >> lane & 1))
    fail_with(place(site) + print(" with mask 0x%08x, in which it is not", mask));
  if (op == SHUFFLE && !(mask >> source & 1))
    fail_with(place(site) + print(" reads lane %d, which is not in mask 0x%08x", source, mask));
  self->op = op, self->mask = mask, self->source = source, self->value = value;
  self->site = site;
  wait(IN_WARP);
  bool all = !(mask & ~warps[n / 32].waiting);
  for (unsigned l = 0; l < 32 && all; l++) {
    if (!(mask >> l & 1)) continue;
    all = lanes[l].mask == mask;
    if (all && lanes[l].op != op)
      fail_with(place(site) + print(" meets lane %u at ", l) + place(lanes[l].site));
  }
  if (all) complete(op, mask, lanes);
  if (!all || (mask & (mask - 1))) to_scheduler();
  return self->value;
}

int meet_block(Op op, bool predicate, Site site) {
  self->op = op, self->value = predicate, self->site = site;
  wait(IN_BLOCK);
  in_block++;
  release_block();
  to_scheduler();
  return self->value;
}

const char* launch(const Kernel& what, unsigned x, unsigned y, unsigned count, void** params,
                   Word seed) {
  std::lock_guard<std::mutex> guard(one_at_a_time);
  static thread_local std::string result;
  if (!count || count > 1024) return "a block has 1 to 1024 threads";
  kernel = &what, arguments = params, threads = count;
  failed = false;
  draw.state = seed;
  blockDim.x = count, gridDim.x = x, gridDim.y = y;
  make_fibers(count);
  std::vector<unsigned> blocks(x * y);
  for (unsigned b = 0; b < blocks.size(); b++) blocks[b] = b;
  draw.shuffle(blocks.data(), blocks.size());
  for (unsigned b : blocks) {
    if (failed) break;
    blockIdx = {b % x, b / x, 0};
    run_block();
  }
  result = error;
  return failed ? result.c_str() : nullptr;
}

}  // namespace host
