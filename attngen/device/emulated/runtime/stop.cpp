// What stops a kernel from outside: a fault of the CPU, Ctrl-C, and loops without end. A finding is recorded as of the thread that ran, which
// goes on in `leave_block`, on a stack of its own that nobody needs any more.
#include "state.hpp"

namespace emulator {

volatile bool in_thread;
volatile uint64_t dispatches;
volatile bool interrupted;

namespace {

constexpr double LOOP_SECONDS = 3;                  // so long without a wait or an access, a thread is in an endless loop

volatile bool handling;
uint64_t seen;                                      // dispatches and accesses at the last tick
double progressed;                                  // when these changed

[[noreturn]] void leave_block() {
    combining = false;
    switch_to_scheduler();
    __builtin_unreachable();
}

void send_away(Registers& registers) {
    registers.pc = (uint64_t)leave_block, registers.sp = (uint64_t)stack_at_entry(current->stack_high);
}

void stop(Kind kind, const char* text, Registers& registers, const void* address = nullptr, int bytes = 0) {
    const auto* const code = (const void*)(registers.pc + 1);  // as a return address: behind the instruction
    record(kind, text, 0, code, 0, nullptr, -1, address, bytes);
    handling = true;                // a damaged stack may fault again while its calls are read
    walk_calls(launch.finding->trace, TRACE);
    handling = false;
    send_away(registers);
}

}  // namespace

void at_fault(Fault fault, const void* address, Registers& registers) {
    if (handling) return handling = false, send_away(registers);
    const auto* const at = (const unsigned char*)address;
    const bool near_guard = in_guard(at) || in_guard(at - GUARD_BYTES);
    if (fault == Fault::DIVISION) stop(Kind::DIVISION, "an integer is divided by 0, or the least integer by -1", registers);
    else if (fault == Fault::TRAP) stop(Kind::TRAP, "the thread stops the kernel", registers);
    else if (near_guard) stop(Kind::STACK, STACK_IS_FULL, registers);
    else stop(Kind::OUT_OF_BOUNDS, "an access to memory that does not exist", registers, at, 1);
}

void at_tick(Registers& registers) {
    if (handling || !launch.finding || launch.finding->kind) return;
    const uint64_t now = dispatches + current->accesses;
    const bool is_idle = now == seen;
    seen = now;
    if (!is_idle) progressed = thread_seconds();
    else if (interrupted) stop(Kind::INTERRUPTED, "", registers);
    else if (thread_seconds() - progressed > LOOP_SECONDS) stop(Kind::RUNAWAY, "the thread computes and neither ends, nor waits, nor reads memory of others: an endless loop, here or a few lines below. (Threads run one after another, each up to its next barrier or atomic operation)", registers);
}

void at_interrupt() {
    interrupted = true;
    launch.budget = 0;              // the next access or wait looks
}

void begin_stops() {
    in_thread = interrupted = handling = false;
    begin_interrupts();
    seen = 0, progressed = thread_seconds();
}

void end_stops() { end_interrupts(); }

void out_of_budget(int line, const void* code) {
    if (interrupted) report(Kind::INTERRUPTED, "", line, code);
    report(Kind::RUNAWAY, "the thread has made more accesses and waits than a problem of this size needs: an endless loop, or one that waits for another thread by ordinary accesses (threads run one after another, each up to its next barrier or atomic operation)", line, code);
}

}  // namespace emulator
