// What the runtime's files share: the fibers of a block, the order of what they do, the memory a launch may touch, and the first
// finding.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator.hpp"
#include "platform.hpp"

namespace emulator {

// --- findings (scheduler.cpp)

enum class Kind : int {
    NONE, OUT_OF_BOUNDS, READ_ONLY, UNINITIALIZED_SHARED, UNINITIALIZED_GLOBAL, RACE, IN_FLIGHT, MISALIGNED, DIVERGENT_BARRIER, DEADLOCK, RUNAWAY,
    PROXY_FENCE, WGMMA_FENCE, BARRIER_MISUSE, ACCUMULATOR, DIVERGENT_WARPGROUP, REGISTERS, OPERAND,
    DIVISION, TRAP, STACK, EARLY, INTERRUPTED,
};

#define EXPORTED extern "C" EMULATOR_EXPORTED

constexpr int TRACE = 16, WAITERS = 8;
constexpr size_t STACK_BYTES = 256 * 1024, GUARD_BYTES = 64 * 1024;  // a page of any CPU; below each stack, nothing may be touched

// The stacks of a process, which all libraries use, one launch after another: mapping them for each launch takes longer than a small
// kernel. Python keeps this struct.
struct Stacks {
    unsigned char* memory;
    uint64_t count;
    bool grow(unsigned wanted);     // to at least so many; false if there is not enough memory
};

// A group of threads that wait at one place for one thing, in a deadlock.
struct Waiter {
    int thread, line;
    uint64_t trace[TRACE];          // addresses in the library, innermost first; 0: no more
    uint64_t address;               // the mbarrier's, whose place `text` leaves open as {}; 0: none
    char text[192];
};

// The first thing that went wrong. Python reads this struct (see device.py).
struct Finding {
    int kind;
    int line, other_line;           // of the .cu, where a statement is known; else 0 and the address in the library follows
    uint64_t code, other_code;      // offsets into the library
    int thread, other_thread;       // linear in the block; -1: none
    unsigned block[3];
    uint64_t address;
    int bytes;
    int waiter_count;
    uint64_t trace[TRACE];
    Waiter waiters[WAITERS];
    char text[256];
};

// Fills in the finding, as of thread `current`, and fails the block.
void record(Kind kind, const char* text, int line, const void* code = nullptr, int other_line = 0, const void* other_code = nullptr,
            int other_thread = -1, const void* address = nullptr, int bytes = 0);
// Records the finding and leaves the block: does not return.
[[noreturn]] void report(Kind kind, const char* text, int line, const void* code = nullptr, int other_line = 0, const void* other_code = nullptr,
                         int other_thread = -1, const void* address = nullptr, int bytes = 0);

// --- fibers (scheduler.cpp)

enum class State : uint8_t { READY, AT_BLOCK_BARRIER, AT_WARP, AT_ACTIVE_MASK, AT_MBARRIER, AT_NAMED_BARRIER, AT_WGMMA, AT_REGISTERS, DONE };

struct Copy { unsigned char* to; const void* from; int bytes, source_bytes; const void* code; int line; };

struct Fiber {
    Position position;
    int index, warp, lane;
    State state;
    int line;                       // where it waits
    const char* what;               // what it waits for
    unsigned barrier, parity;       // which mbarrier (its address) or named barrier, which phase
    unsigned votes;                 // of the threads that came to its last named barrier
    bool has_waited;                // for the kernels before this one
    uint64_t trace[TRACE];          // and the calls it is in
    unsigned mask;
    Lane lane_arguments;
    Combine combine;
    uint64_t accesses;              // and waits, by their costs: at most launch.budget
    unsigned* clock;                // see order.cpp
    std::vector<unsigned> proxy_fences, init_fences;
    std::vector<unsigned> known_at_fence, known_by_atomics;  // clocks: at its last __threadfence; what atomic updates will have told it at the next
    void* stack_pointer;
    unsigned char *stack_low, *stack_high;
    std::vector<Copy> uncommitted;
    std::vector<std::vector<Copy>> groups;
    std::vector<uint64_t> call_hashes;  // tracing: of the calls that it is in, outermost first
    int phase, epoch, order;        // tracing: see Step
};

extern std::vector<Fiber> fibers;
extern unsigned thread_count;      // fibers.size()
extern Fiber* current;
extern Position* running;
extern unsigned char* running_stack;  // its lowest address; STACK_BYTES from there
extern bool combining;             // a Combine runs: what it touches are the lanes' own arguments
extern const void* collective_code; // from where the warp came to it,
extern Fiber* collective_last;      // and the lane that came last: the one that runs it

void switch_to_scheduler();
void wait_in(State state, const char* what, int line);  // until somebody makes the fiber READY
template <typename Where> void wake(State state, Where where) {
    for (Fiber& f : fibers)
        if (f.state == state && where(f)) f.state = State::READY;
}

// --- switching (switch.cpp)

#if defined(__x86_64__)
#define SAME_ON_ALL_SYSTEMS __attribute__((sysv_abi))  // callers on Windows save the other registers that a function must keep there
#else
#define SAME_ON_ALL_SYSTEMS
#endif
extern "C" SAME_ON_ALL_SYSTEMS void emulator_switch(void** save_stack_pointer, void* stack_pointer) asm("emulator_switch");
void* stack_at_entry(unsigned char* high);           // the stack pointer of a function that has just been called, on an empty stack
void* prepare_stack(unsigned char* low, unsigned char* high, void (*entry)());  // a stack that "returns" into `entry` when first switched to

// --- what stops a kernel from outside (stop.cpp)

extern volatile bool in_thread;     // a fiber runs, not the scheduler
extern volatile uint64_t dispatches;  // of fibers
extern volatile bool interrupted;   // by Ctrl-C
void begin_stops();
void end_stops();
[[noreturn]] void out_of_budget(int line, const void* code);

// Called by the operating system's part while the thread that launches is interrupted in a fiber. What they write to the registers is where
// that thread goes on.
enum class Fault { DIVISION, TRAP, ACCESS };
struct Registers { uint64_t pc, sp; };
constexpr const char* STACK_IS_FULL = "the thread's stack is full: it has 256 KB for local variables; an endless recursion, or a local array that is too large";
inline bool in_guard(const unsigned char* address) { return size_t(current->stack_low - 1 - address) < GUARD_BYTES; }
void at_fault(Fault fault, const void* address, Registers& registers);
void at_tick(Registers& registers);
void at_interrupt();                // by Ctrl-C, wherever the thread is

// --- the operating system (posix.cpp: Linux and macOS; windows.cpp)

struct Bytes { unsigned char *low, *high; };
unsigned char* map_memory(size_t bytes);             // null: there is not enough
void unmap_memory(unsigned char* memory, size_t bytes);
bool guard(unsigned char* stack_low);                // GUARD_BYTES below a stack: what touches them is Fault::ACCESS
Bytes static_shared();                               // see platform.hpp
const void* library_of(const void* address);         // the begin of the program or library that contains it; null: none does
int walk_calls(uint64_t* to, int most);              // the calls that the current thread is in, innermost first, and 0 where there are no more
double thread_seconds();                             // of the CPU, for the thread that launches: independent of the load of the machine
constexpr long TICK = 50'000'000;                    // ns of the CPU, about, between two calls of at_tick
void begin_interrupts();
void end_interrupts();

// --- order (order.cpp)

constexpr int MAX_AGENTS = 256;     // mbarriers, warpgroups with wgmma, threads that store by TMA

// Something that reads or writes memory on behalf of threads, in the background: it has a clock's place of its own.
enum class Background : uint8_t { TMA_LOAD, TMA_STORE, WGMMA };
struct Agent { Background kind; int thread; };

// An access. `thread` is a thread's number, or from the number of threads on an agent's.
struct Touch {
    unsigned time = 0;
    int thread : 12;                // -1: none; at most 1024 threads and the agents
    unsigned line : 20;
    int code_offset = 0;            // from `library`; 0: no code

    Touch() : thread(-1), line(0) {}
    Touch(int thread, unsigned time, const void* code, int line)
        : time(time), thread(thread), line(line), code_offset(code ? int((const char*)code - &library) : 0) {}
    const void* code() const { return code_offset ? &library + code_offset : nullptr; }
    static char library;            // its address is the origin of offsets
};
using Clock = std::vector<unsigned>;

void begin_block_order();
Clock new_clock();
size_t clock_width();                                // the times of a clock that are in use; the others are 0
int new_agent(Background kind, int thread);
const Agent* agent_of(int thread);                   // null: an ordinary thread
inline bool ordered(const Touch& before, const unsigned* clock) { return before.thread < 0 || before.time <= clock[before.thread]; }
bool fenced(const Touch& before, const unsigned* clock);
inline Touch touch(int line, const void* code) { return {current->index, current->clock[current->index], code, line}; }
void release(Clock& to);                             // what the current thread has done is known to whoever acquires `to`
void acquire(Fiber& fiber, const Clock& from);
void meet_all(int first, int count, unsigned mask);  // each of these threads knows what all have done
void pass_on(Clock& of_address);                     // an atomic update, between the __threadfence of one thread and that of another

// --- memory (memory.cpp)

struct Range {                      // one Memory of the protocol; Python writes all but the counters
    uint64_t pointer, bytes;
    int writable, element_bytes;
    const unsigned char* elements;  // of a tensor with gaps: for each place in the range, whether it is an element. Null: all are
    uint64_t read, written;         // counters, in bytes
};

constexpr int MAX_GROUPS = 64;
static_assert(MAX_GROUPS * 32 >= 1024 + MAX_AGENTS);

// Reads of the same time and place, by threads or agents of a group of 32: mostly of a warp.
struct Readers {
    unsigned time, lanes;           // lanes: which of the group; 0: nobody
    unsigned group : 6;             // thread / 32
    unsigned place : 26;            // see place_of in memory.cpp
};

// Two bytes of shared memory: who wrote them last, and who has read them since. `has_more`, `overflow`: see More and overflows in memory.cpp.
struct Cell {
    static constexpr int ROOM = 4;
    Touch writer;
    int in_flight : 12;
    unsigned initialized : 1, has_more : 1, overflow : 18;
    Readers readers[ROOM];
    Cell() : in_flight(-1), initialized(false), has_more(false), overflow(0), readers() {}
};
static_assert(sizeof(Cell) == 64, "a line of the CPU's cache");

struct Launch {
    bool checked, traced;           // traced: checked too
    bool early;                     // a GPU may start the kernel while those before it run
    uint64_t budget;
    Finding* finding;
    Range* ranges;
    int range_count;
    uint64_t* instruction_counts;
    uint64_t shared_read, shared_written, barriers;
    std::vector<std::vector<uint64_t>> writers;  // for each writable range: launch and thread that wrote each 2 bytes
    uint64_t sequence;
};

extern Launch launch;
// Costs of waits, in accesses: so long do they take, about.
constexpr uint64_t BLOCK_BARRIER_COST = 1024, WARP_COST = 128, WAIT_COST = 1024, ATOMIC_COST = 1;
inline void spend(uint64_t cost, int line, const void* code) {
    if ((current->accesses += cost) > launch.budget) out_of_budget(line, code);
}

constexpr unsigned SHARED_WINDOW = 0x1000;           // PTX addresses of dynamic shared memory begin here
unsigned static_window();                            // those of static arrays
void begin_block_memory(size_t dynamic_bytes, dim3 block, dim3 grid);
void reserve_shared(size_t dynamic_bytes);
// Accesses of the background to shared memory, known to be ordered after what `clock` knows.
void background_read(unsigned address, int bytes, int line, const unsigned* clock, const Touch& reader);
void background_write(unsigned address, int bytes, int line, const unsigned* clock, const Touch& writer);
const Range* background_global(const void* address, int bytes, bool write, int line);
void keep_for_mbarrier(unsigned address, int line);  // 8 bytes that ordinary accesses must leave alone
Touch last_writer(unsigned address);

// --- mbarriers (mbarrier.cpp)

struct Ticket { unsigned barrier; unsigned phase; Touch writer; };  // a copy that will bring bytes in this phase
void begin_block_mbarriers();
bool uses_mbarriers();
Ticket ticket(unsigned barrier, int line);
bool bring_bytes(const Ticket& ticket, int bytes, int line);        // false: the block has failed
void describe_mbarrier(const Fiber& fiber, Waiter& waiter);

// --- named barriers and registers (warpgroup.cpp)

void begin_block_warpgroups();
void describe_named_barrier(const Fiber& fiber, char* text, size_t size);
bool end_block_warpgroups();

// --- the background (tma.cpp, wgmma.cpp)

void begin_block_tma();
bool land_one_load(uint64_t random);                 // false: none is under way
bool end_block_copies();
bool end_block_tma();
void end_thread_tma();
void begin_block_wgmma();
void end_thread_wgmma();

}  // namespace emulator
