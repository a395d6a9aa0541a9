#include "forward.h"

#include "../dl.h"

#include <string>

// Each function stores the address of its Function in r10 and jumps to forward_call. Weak, so that a library can define
// a function in C++.
#define FUNCTION(name)                                                                   \
  Function forward_##name{nullptr, #name};                                               \
  asm(".weak " #name "\n.type " #name ", @function\n" #name ":\n"                        \
      "  leaq forward_" #name "(%rip), %r10\n  jmp forward_call\n.size " #name ", .-" #name "\n");
#include FUNCTIONS
#undef FUNCTION

// Calls the target with the same registers and 32 words of the caller's stack, more than any of these functions has
// arguments, and translates the result.
asm(R"(
forward_call:
  .cfi_startproc
  pushq %rbp
  .cfi_def_cfa_offset 16
  .cfi_offset %rbp, -16
  movq %rsp, %rbp
  .cfi_def_cfa_register %rbp
  subq $256, %rsp
  .set at, 0
  .rept 16
  movups at+16(%rbp), %xmm8
  movups %xmm8, at(%rsp)
  .set at, at+16
  .endr
  call *(%r10)
  movq %rax, %rdi
  call forward_result
  leave
  .cfi_def_cfa %rsp, 8
  ret
  .cfi_endproc
)");

extern "C" __attribute__((weak, visibility("hidden"))) unsigned long long forward_result(unsigned long long result) {
  return result;
}

static Function* const g_functions[] = {
#define FUNCTION(name) &forward_##name,
#include FUNCTIONS
#undef FUNCTION
};

static void* g_library;

void* forward_symbol(const char* name) { return dlsym(g_library, name); }

// Opens the newer library. Returns null, or why that fails.
API const char* gluon_amp_forward_open(const char* path) {
  g_library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!g_library) return dlerror();
  for (Function* each : g_functions)
    each->target = forward_symbol(each->name);
  return nullptr;
}

// Returns the names of functions that have no target, with a space after each.
API const char* gluon_amp_forward_missing() {
  static std::string names;
  names.clear();
  for (const Function* each : g_functions)
    if (!each->target) (names += each->name) += ' ';
  return names.c_str();
}
