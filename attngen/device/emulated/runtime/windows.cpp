// Windows: memory, libraries, calls, and what interrupts a thread.
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#undef near
#undef far
#include <csignal>

#include "state.hpp"

namespace emulator {

// --- memory and libraries

namespace { constexpr size_t PAGE = 4096; }

unsigned char* map_memory(size_t bytes) { return (unsigned char*)VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE); }

void unmap_memory(unsigned char* memory, size_t) { VirtualFree(memory, 0, MEM_RELEASE); }

// As below the stack of a CPU thread: a page that the system moves down when it is touched, until too few are left: a stack overflow.
bool guard(unsigned char* stack_low) {
    return VirtualFree(stack_low - GUARD_BYTES, GUARD_BYTES, MEM_DECOMMIT) &&
           VirtualAlloc(stack_low - PAGE, PAGE, MEM_COMMIT, PAGE_READWRITE | PAGE_GUARD);
}

const void* library_of(const void* address) {
    HMODULE found = nullptr;
    constexpr DWORD how = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    return GetModuleHandleExA(how, (LPCSTR)address, &found) ? (const void*)found : nullptr;
}

namespace {  // the linker orders the parts of a section by what follows the $
__attribute__((used, section("shared$a"), aligned(1024))) unsigned char shared_low[1];
__attribute__((used, section("shared$c"))) unsigned char shared_high[1];
}  // namespace
Bytes static_shared() { return {shared_low, shared_high}; }

// --- calls

namespace {
const CONTEXT* stopped;             // where the thread that launches has been stopped; null: in walk_calls itself
}

int walk_calls(uint64_t* to, int most) {
    CONTEXT frame;
    stopped ? void(frame = *stopped) : RtlCaptureContext(&frame);
    int count = 0;
    for (int i = 0; i < most; ++i) to[i] = 0;
    while (count < most && frame.Rip && frame.Rsp >= (DWORD64)current->stack_low - GUARD_BYTES && frame.Rsp < (DWORD64)current->stack_high) {
        to[count] = frame.Rip + (stopped && count == 0 ? 1 : 0);  // the place of an instruction, not behind a call
        ++count;
        DWORD64 base, establisher;
        void* data;
        if (RUNTIME_FUNCTION* const entry = RtlLookupFunctionEntry(frame.Rip, &base, nullptr))
            RtlVirtualUnwind(UNW_FLAG_NHANDLER, base, frame.Rip, entry, &frame, &data, &establisher, nullptr);
        else frame.Rip = *(DWORD64*)frame.Rsp, frame.Rsp += 8;  // a function that calls none
    }
    return count;
}

// --- exceptions, the clock, Ctrl-C

namespace {

using Handler = void (*)(int);

HANDLE launching, ended, clock_thread;
DWORD launching_id;
void* exceptions;
Handler before_interrupt, before_abort;
unsigned char* overflowed;          // the stack whose guard has been used up

bool is_ours() { return in_thread && GetCurrentThreadId() == launching_id; }

template <typename Visit> void with_registers(CONTEXT& context, Visit visit) {
    Registers registers{context.Rip, context.Rsp};
    stopped = &context;
    visit(registers);
    stopped = nullptr;
    context.Rip = registers.pc, context.Rsp = registers.sp;
}

LONG CALLBACK on_exception(EXCEPTION_POINTERS* exception) {
    if (!is_ours()) return EXCEPTION_CONTINUE_SEARCH;
    const EXCEPTION_RECORD& record = *exception->ExceptionRecord;
    const void* address = nullptr;
    Fault fault;
    switch (record.ExceptionCode) {
    case EXCEPTION_INT_DIVIDE_BY_ZERO: case EXCEPTION_INT_OVERFLOW: fault = Fault::DIVISION; break;
    case EXCEPTION_ILLEGAL_INSTRUCTION: case EXCEPTION_PRIV_INSTRUCTION: case EXCEPTION_BREAKPOINT: fault = Fault::TRAP; break;
    case EXCEPTION_ACCESS_VIOLATION: case EXCEPTION_IN_PAGE_ERROR: fault = Fault::ACCESS, address = (const void*)record.ExceptionInformation[1]; break;
    case EXCEPTION_STACK_OVERFLOW: fault = Fault::ACCESS, address = overflowed = current->stack_low; break;
    default: return EXCEPTION_CONTINUE_SEARCH;
    }
    with_registers(*exception->ContextRecord, [&](Registers& registers) { at_fault(fault, address, registers); });
    return EXCEPTION_CONTINUE_EXECUTION;
}

DWORD WINAPI watch(void*) {
    while (WaitForSingleObject(ended, TICK / 1'000'000) == WAIT_TIMEOUT) {
        SuspendThread(launching);
        CONTEXT context = {};
        context.ContextFlags = CONTEXT_FULL;
        if (GetThreadContext(launching, &context) && in_thread) {  // which waits until the thread is suspended
            with_registers(context, at_tick);
            SetThreadContext(launching, &context);
        }
        ResumeThread(launching);
    }
    return 0;
}

void on_interrupt(int number) {     // on a thread of its own, or that of who calls raise; Python's handler sets itself again
    at_interrupt();
    before_interrupt(number);
}

void on_abort(int number) {
    if (is_ours()) report(Kind::TRAP, "the thread stops the kernel", 0, __builtin_return_address(0));
    signal(number, before_abort);
    raise(number);
}

bool has_function(Handler handler) { return handler != SIG_DFL && handler != SIG_IGN && handler != SIG_ERR; }

}  // namespace

double thread_seconds() {
    FILETIME created, exited, in_system, in_program;
    GetThreadTimes(launching, &created, &exited, &in_system, &in_program);
    const auto ticks = [](const FILETIME& time) { return double(uint64_t(time.dwHighDateTime) << 32 | time.dwLowDateTime); };
    return 1e-7 * (ticks(in_system) + ticks(in_program));
}

void begin_interrupts() {
    launching_id = GetCurrentThreadId();
    DuplicateHandle(GetCurrentProcess(), GetCurrentThread(), GetCurrentProcess(), &launching, 0, FALSE, DUPLICATE_SAME_ACCESS);
    exceptions = AddVectoredExceptionHandler(1, on_exception);
    before_abort = signal(SIGABRT, on_abort);
    before_interrupt = signal(SIGINT, SIG_IGN);
    signal(SIGINT, has_function(before_interrupt) ? on_interrupt : before_interrupt);
    ended = CreateEventA(nullptr, TRUE, FALSE, nullptr);
    clock_thread = CreateThread(nullptr, 0, watch, nullptr, 0, nullptr);
}

void end_interrupts() {
    SetEvent(ended);
    WaitForSingleObject(clock_thread, INFINITE);
    signal(SIGINT, before_interrupt);
    signal(SIGABRT, before_abort);
    RemoveVectoredExceptionHandler(exceptions);
    for (HANDLE one : {clock_thread, ended, launching}) CloseHandle(one);
    if (overflowed) guard(overflowed), overflowed = nullptr;
}

}  // namespace emulator
#endif
