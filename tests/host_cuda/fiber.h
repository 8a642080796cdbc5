// Switches between the stacks of fibers, and tells AddressSanitizer so.
#pragma once

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define STACK (256 << 10)
#define LEAVE __sanitizer_start_switch_fiber
#define ARRIVE __sanitizer_finish_switch_fiber
#define CLEAN __asan_unpoison_memory_region
#else
#define STACK (64 << 10)
#define LEAVE(...)
#define ARRIVE(...)
#define CLEAN(...)
#endif

// Saves what a call preserves, and goes on where the other context was saved, or begins.
#if defined(__x86_64__) && !defined(HOST_UCONTEXT)
struct Context {
  void* stack;
};
extern "C" void host_switch(Context* from, const Context* to);
asm(R"(
  .text
  .globl host_switch
  .hidden host_switch
  .type host_switch, @function
host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size host_switch, .-host_switch
)");
inline void prepare(Context& context, char* stack, void (*entry)()) {
  void** top = (void**)(stack + STACK) - 2;  // the entry finds the stack as after a call
  *top = (void*)entry;
  context.stack = top - 6;
}
#else
#include <ucontext.h>

typedef ucontext_t Context;
inline void host_switch(Context* from, const Context* to) { swapcontext(from, to); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack = {stack, 0, STACK};
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#endif
