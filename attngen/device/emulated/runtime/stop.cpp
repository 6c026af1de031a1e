// What stops a kernel from outside: a fault of the CPU (SIGSEGV, SIGFPE, ...), Ctrl-C, and loops without end. A signal handler records a
// finding as of the thread that ran, and sends that thread to `leave`, on a stack of its own that nobody needs any more.
#include <csignal>
#include <cstdio>
#include <ctime>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "state.hpp"

namespace emulator {

volatile bool in_thread;
volatile uint64_t dispatches;
volatile bool interrupted;

namespace {

constexpr long TICK = 50'000'000;                   // ns of the CPU between two looks at the running thread
constexpr double LOOP_SECONDS = 3;                  // so long without a wait or an access, a thread is in an endless loop
constexpr size_t HANDLER_STACK = 128 * 1024;
constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
constexpr int FAULT_COUNT = sizeof(FAULTS) / sizeof(*FAULTS);
constexpr int CLOCK_SIGNAL = SIGVTALRM;             // debuggers pass it on without a stop

struct sigaction before[FAULT_COUNT], before_interrupt, before_clock;
stack_t stack_before;
unsigned char* handler_stack;
timer_t timer;
bool has_timer;
pid_t launching;                                    // the thread that launches: signals of others are not ours
volatile bool handling;
uint64_t seen;                                      // dispatches and accesses at the last tick
double progressed;                                  // when these changed

double seconds() {                                  // of the CPU, for this thread: independent of the load of the machine
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}
pid_t this_thread() { return pid_t(syscall(SYS_gettid)); }
bool is_ours() { return in_thread && this_thread() == launching; }

[[noreturn]] void leave() {
    combining = false;
    switch_to_scheduler();
    __builtin_unreachable();
}

// When the handler returns, the thread goes on in `leave`.
void send_away(ucontext_t& context) {
    const uintptr_t top = (uintptr_t)current->stack_high & ~uintptr_t(15);
#if defined(__x86_64__)
    context.uc_mcontext.gregs[REG_RIP] = (greg_t)leave;
    context.uc_mcontext.gregs[REG_RSP] = (greg_t)(top - 8);  // as after a call
#else
    context.uc_mcontext.pc = (uintptr_t)leave;
    context.uc_mcontext.sp = top;
#endif
}

const void* place_of(const ucontext_t& context) {   // as a return address: behind the instruction
#if defined(__x86_64__)
    return (const void*)(context.uc_mcontext.gregs[REG_RIP] + 1);
#else
    return (const void*)(context.uc_mcontext.pc + 1);
#endif
}

void stop(Kind kind, const char* text, ucontext_t& context, const void* address = nullptr, int bytes = 0) {
    record(kind, text, 0, place_of(context), 0, nullptr, -1, address, bytes);
    handling = true;                // a damaged stack may fault again while its calls are read
    walk_calls(launch.finding->trace, TRACE);
    handling = false;
    send_away(context);
}

void on_fault(int number, siginfo_t* info, void* raw) {
    auto& context = *(ucontext_t*)raw;
    if (!is_ours()) {               // not of a kernel: as it was
        for (int i = 0; i < FAULT_COUNT; ++i)
            if (FAULTS[i] == number) sigaction(number, &before[i], nullptr);
        if (info->si_code <= 0) raise(number);
        return;
    }
    if (handling) return handling = false, send_away(context);
    const auto* at = (const unsigned char*)info->si_addr;
    const bool in_guard = at >= current->stack_low - GUARD_BYTES && at < current->stack_low + GUARD_BYTES;
    if (number == SIGFPE) stop(Kind::DIVISION, "an integer is divided by 0, or the least integer by -1", context);
    else if (number == SIGABRT || number == SIGILL || number == SIGTRAP) stop(Kind::TRAP, "the thread stops the kernel", context);
    else if (in_guard) stop(Kind::STACK, "the thread's stack is full: it has 256 KB for local variables; an endless recursion, or a local array that is too large", context);
    else stop(Kind::OUT_OF_BOUNDS, "an access to memory that does not exist", context, at, 1);
}

void on_tick(int, siginfo_t*, void* raw) {
    if (!is_ours() || handling || !launch.finding || launch.finding->kind) return;
    const uint64_t now = dispatches + current->accesses;
    const bool is_idle = now == seen;
    seen = now;
    if (!is_idle) progressed = seconds();
    else if (interrupted) stop(Kind::INTERRUPTED, "", *(ucontext_t*)raw);
    else if (seconds() - progressed > LOOP_SECONDS) stop(Kind::RUNAWAY, "the thread computes and neither ends, nor waits, nor reads memory of others: an endless loop, here or a few lines below. (Threads run one after another, each up to its next barrier or atomic operation)", *(ucontext_t*)raw);
}

void on_interrupt(int number, siginfo_t* info, void* context) {
    interrupted = true;
    launch.budget = 0;              // the next access or wait looks
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

}  // namespace

void begin_stops() {
    launching = this_thread();
    in_thread = interrupted = handling = false;
    seen = 0, progressed = seconds();
    if (!handler_stack) {
        void* memory = mmap(nullptr, HANDLER_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        handler_stack = memory == MAP_FAILED ? nullptr : (unsigned char*)memory;
    }
    stack_t own = {};
    own.ss_sp = handler_stack, own.ss_size = HANDLER_STACK;
    if (!handler_stack) own.ss_flags = SS_DISABLE;
    sigaltstack(&own, &stack_before);
    for (int i = 0; i < FAULT_COUNT; ++i) handle(FAULTS[i], on_fault, &before[i], SA_NODEFER);
    sigaction(SIGINT, nullptr, &before_interrupt);
    if (has_function(before_interrupt)) handle(SIGINT, on_interrupt, nullptr);
    handle(CLOCK_SIGNAL, on_tick, &before_clock);
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID, event.sigev_signo = CLOCK_SIGNAL;
    event._sigev_un._tid = launching;
    has_timer = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer) == 0;
    const itimerspec every = {{0, TICK}, {0, TICK}};
    if (has_timer) timer_settime(timer, 0, &every, nullptr);
}

void end_stops() {
    if (has_timer) timer_delete(timer);
    sigaction(CLOCK_SIGNAL, &before_clock, nullptr);
    if (has_function(before_interrupt)) sigaction(SIGINT, &before_interrupt, nullptr);
    for (int i = 0; i < FAULT_COUNT; ++i) sigaction(FAULTS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
}

void out_of_budget(int line, const void* code) {
    if (interrupted) report(Kind::INTERRUPTED, "", line, code);
    report(Kind::RUNAWAY, "the thread has made more accesses and waits than a problem of this size needs: an endless loop, or one that waits for another thread by ordinary accesses (threads run one after another, each up to its next barrier or atomic operation)", line, code);
}

}  // namespace emulator
