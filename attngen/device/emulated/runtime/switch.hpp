// Switching between fibers: saves the registers that a called function must keep, swaps stacks, restores.
#pragma once

extern "C" void emulator_switch(void** save_stack_pointer, void* stack_pointer);

#if defined(__x86_64__)
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");
// A stack that "returns" into `entry` when first switched to.
inline void* prepare_stack(unsigned char* high, void (*entry)()) {
    void** top = (void**)((unsigned long long)high & ~15ull);
    *--top = nullptr;               // where entry would return to: it never does
    *--top = (void*)entry;
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    return top;
}
#elif defined(__aarch64__)
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, %function
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
.size emulator_switch, .-emulator_switch
)");
inline void* prepare_stack(unsigned char* high, void (*entry)()) {
    void** top = (void**)(((unsigned long long)high & ~15ull) - 160);
    for (int i = 0; i < 20; ++i) top[i] = nullptr;
    top[11] = (void*)entry;         // x30, the return address
    return top;
}
#else
#error "the emulated device knows x86-64 and AArch64"
#endif
