// Linux and macOS: memory, libraries, calls, and the signals by which a thread is interrupted.
#ifndef _WIN32
#include <csignal>
#include <ctime>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/ucontext.h>
#include <unistd.h>
#include <unwind.h>
#if defined(__APPLE__)
#include <sys/time.h>
#else
#include <link.h>
#include <sys/syscall.h>
#endif

#include "state.hpp"

namespace emulator {

// --- memory and libraries

unsigned char* map_memory(size_t bytes) {
    void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return mapped == MAP_FAILED ? nullptr : (unsigned char*)mapped;
}

void unmap_memory(unsigned char* memory, size_t bytes) { munmap(memory, bytes); }

bool guard(unsigned char* stack_low) { return mprotect(stack_low - GUARD_BYTES, GUARD_BYTES, PROT_NONE) == 0; }

const void* library_of(const void* address) {
    Dl_info info;
    return dladdr(address, &info) ? info.dli_fbase : nullptr;
}

namespace { EMULATOR_SHARED volatile unsigned char anchor; }  // a static array is always there

#if defined(__APPLE__)
extern unsigned char shared_low asm("section$start$__DATA$__shared"), shared_high asm("section$end$__DATA$__shared");
Bytes static_shared() { return {&shared_low, &shared_high}; }
#else
Bytes static_shared() {
    Bytes found = {};
    anchor = 0;                                     // from the first access on they have memory
    dl_iterate_phdr([](dl_phdr_info* library, size_t, void* to) {
        for (int i = 0; i < library->dlpi_phnum; ++i) {
            auto* const low = (unsigned char*)library->dlpi_tls_data;
            const size_t bytes = library->dlpi_phdr[i].p_type == PT_TLS ? library->dlpi_phdr[i].p_memsz : 0;
            if (low && size_t(&anchor - low) < bytes) return *(Bytes*)to = {low, low + bytes}, 1;
        }
        return 0;
    }, &found);
    return found;
}
#endif

int walk_calls(uint64_t* to, int most) {
    struct Walk { uint64_t* next; uint64_t* end; } walk{to, to + most};
    for (int i = 0; i < most; ++i) to[i] = 0;
    _Unwind_Backtrace([](_Unwind_Context* frame, void* to) {
        Walk& walk = *(Walk*)to;
        if (walk.next == walk.end) return _URC_END_OF_STACK;
        int is_exact = 0;           // of a frame that a signal interrupted: the place of an instruction, not behind a call
        const uint64_t at = _Unwind_GetIPInfo(frame, &is_exact);
        *walk.next++ = at + (is_exact ? 1 : 0);
        return _URC_NO_REASON;
    }, &walk);
    return int(walk.next - to);
}

// --- signals

namespace {

constexpr size_t HANDLER_STACK = 128 * 1024;
constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
constexpr int FAULT_COUNT = sizeof(FAULTS) / sizeof(*FAULTS);
constexpr int CLOCK_SIGNAL = SIGVTALRM;             // debuggers pass it on without a stop

struct sigaction before[FAULT_COUNT], before_interrupt, before_clock;
stack_t stack_before;
unsigned char* handler_stack;
pthread_t launching;                                // signals of other threads are not ours

bool is_launching() { return pthread_equal(pthread_self(), launching); }

// Calls `visit` with the registers of an interrupted thread, and changes them as it does.
template <typename Visit> void with_registers(void* raw, Visit visit) {
    auto& context = ((ucontext_t*)raw)->uc_mcontext;
#if defined(__APPLE__) && defined(__x86_64__)
    auto &pc = context->__ss.__rip, &sp = context->__ss.__rsp;
#elif defined(__APPLE__)
    auto &pc = context->__ss.__pc, &sp = context->__ss.__sp;
#elif defined(__x86_64__)
    auto &pc = context.gregs[REG_RIP], &sp = context.gregs[REG_RSP];
#else
    auto &pc = context.pc, &sp = context.sp;
#endif
    Registers registers{uint64_t(pc), uint64_t(sp)};
    visit(registers);
    pc = registers.pc, sp = registers.sp;
}

void on_fault(int number, siginfo_t* info, void* raw) {
    if (!in_thread || !is_launching()) {  // not of a kernel: as it was
        for (int i = 0; i < FAULT_COUNT; ++i)
            if (FAULTS[i] == number) sigaction(number, &before[i], nullptr);
        if (info->si_code <= 0) raise(number);
        return;
    }
    const Fault fault = number == SIGFPE ? Fault::DIVISION : number == SIGSEGV || number == SIGBUS ? Fault::ACCESS : Fault::TRAP;
    with_registers(raw, [&](Registers& registers) { at_fault(fault, info->si_addr, registers); });
}

void on_tick(int number, siginfo_t*, void* raw) {
    if (!is_launching()) return void(pthread_kill(launching, number));  // macOS: the clock is of the process
    if (in_thread) with_registers(raw, at_tick);
}

void on_interrupt(int number, siginfo_t* info, void* context) {
    at_interrupt();
    if (before_interrupt.sa_flags & SA_SIGINFO) before_interrupt.sa_sigaction(number, info, context);
    else before_interrupt.sa_handler(number);
}

void handle(int number, void (*handler)(int, siginfo_t*, void*), struct sigaction* old, int flags = 0) {
    struct sigaction action = {};
    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART | flags;
    sigaction(number, &action, old);
}

bool has_function(const struct sigaction& action) {
    return action.sa_flags & SA_SIGINFO || (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

#if defined(__APPLE__)
void set_clock(long microseconds) {
    const itimerval every = {{0, int(microseconds)}, {0, int(microseconds)}};
    setitimer(ITIMER_VIRTUAL, &every, nullptr);
}
void begin_clock() { set_clock(TICK / 1000); }
void end_clock() { set_clock(0); }
#else
timer_t timer;
bool has_timer;

void begin_clock() {
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID, event.sigev_signo = CLOCK_SIGNAL;
    event._sigev_un._tid = pid_t(syscall(SYS_gettid));
    has_timer = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer) == 0;
    const itimerspec every = {{0, TICK}, {0, TICK}};
    if (has_timer) timer_settime(timer, 0, &every, nullptr);
}
void end_clock() {
    if (has_timer) timer_delete(timer);
}
#endif

}  // namespace

double thread_seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

void begin_interrupts() {
    launching = pthread_self();
    if (!handler_stack) handler_stack = map_memory(HANDLER_STACK);
    stack_t own = {};
    own.ss_sp = handler_stack, own.ss_size = HANDLER_STACK;
    if (!handler_stack) own.ss_flags = SS_DISABLE;
    sigaltstack(&own, &stack_before);
    for (int i = 0; i < FAULT_COUNT; ++i) handle(FAULTS[i], on_fault, &before[i], SA_NODEFER);
    sigaction(SIGINT, nullptr, &before_interrupt);
    if (has_function(before_interrupt)) handle(SIGINT, on_interrupt, nullptr);
    handle(CLOCK_SIGNAL, on_tick, &before_clock);
    begin_clock();
}

void end_interrupts() {
    end_clock();
    sigaction(CLOCK_SIGNAL, &before_clock, nullptr);
    if (has_function(before_interrupt)) sigaction(SIGINT, &before_interrupt, nullptr);
    for (int i = 0; i < FAULT_COUNT; ++i) sigaction(FAULTS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
}

}  // namespace emulator

#ifdef __ELF__
// Destroys this library's static objects when it is closed. zig links no code that does, so exit would call their destructors in
// memory that is no longer mapped. After the code that other compilers link, this does nothing.
extern void* __dso_handle __attribute__((visibility("hidden")));
extern "C" void __cxa_finalize(void* library);
__attribute__((destructor)) static void destroy_static_objects() { __cxa_finalize(&__dso_handle); }
#endif
#endif
