// Switching between fibers: saves the registers that a called function must keep, swaps stacks, restores.
#include "state.hpp"

#ifdef __ELF__
#define END ".type emulator_switch, %function\n.size emulator_switch, .-emulator_switch\n"
#else
#define END ""
#endif

#if defined(__x86_64__)
#if defined(_WIN32)  // the bounds of the stack, in the block of the CPU thread (TEB): its base, its limit, the end of what is reserved
#define SAVE_BOUNDS "pushq %gs:0x8\n pushq %gs:0x10\n pushq %gs:0x1478\n"
#define RESTORE_BOUNDS "popq %gs:0x1478\n popq %gs:0x10\n popq %gs:0x8\n"
#else
#define SAVE_BOUNDS ""
#define RESTORE_BOUNDS ""
#endif
asm(R"(
.text
.globl emulator_switch
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
)" SAVE_BOUNDS R"(
    movq %rsp, (%rdi)
    movq %rsi, %rsp
)" RESTORE_BOUNDS R"(
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)" END);

namespace emulator {

// Below the address to which it would return, and on Windows 32 bytes that a function may use.
void* stack_at_entry(unsigned char* high) { return (unsigned char*)((uint64_t)high & ~15ull) - 40; }

void* prepare_stack([[maybe_unused]] unsigned char* low, unsigned char* high, void (*entry)()) {
    void** top = (void**)stack_at_entry(high);
    *top = nullptr;                 // where entry would return to: it never does
    *--top = (void*)entry;
    for (int i = 0; i < 6; ++i) *--top = nullptr;
#if defined(_WIN32)
    *--top = high, *--top = low, *--top = low - GUARD_BYTES;
#endif
    return top;
}

}  // namespace emulator
#elif defined(__aarch64__)
asm(R"(
.text
.globl emulator_switch
emulator_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)" END);

namespace emulator {

void* stack_at_entry(unsigned char* high) { return (void*)((uint64_t)high & ~15ull); }

void* prepare_stack(unsigned char*, unsigned char* high, void (*entry)()) {
    void** top = (void**)((unsigned char*)stack_at_entry(high) - 160);
    for (int i = 0; i < 20; ++i) top[i] = nullptr;
    top[11] = (void*)entry;         // x30, the return address
    return top;
}

}  // namespace emulator
#else
#error "the emulated device knows x86-64 and AArch64"
#endif
#undef END
