// Tracing (trace.cpp): what each statement of a kernel asks of memory, a warp at a time, and the steps of chosen threads. All of these
// are called only where launch.traced is set. Python reads the structs (see tracing.py).
#pragma once
#include "state.hpp"

namespace emulator {

constexpr int CALLS = 24;           // addresses of a statement's calls that are kept

// A statement, by the calls that it is in (addresses in the library, innermost first), what it does, and to which buffer.
struct Site {
    uint64_t calls[CALLS];
    const char* what;               // "load", "store", "cp.async", "ldmatrix", "mma", "block barrier", ...
    int launch;                     // of the call: from 0
    int statement;                  // in the order of their first execution
    int write, buffer;              // buffer: of the table that Python gave; -1: no memory is accessed
    uint64_t executions;            // by a warp; TMA and wgmma, which are one instruction for many threads: by those
    uint64_t lanes;                 // that took part
    uint64_t bytes;                 // of all lanes
    uint64_t phases, wavefronts;    // shared memory: what the executions take without and with bank conflicts
    uint64_t sectors;               // global memory: of 32 bytes, that the executions touch
    int degree;                     // the most wavefronts of one phase
    int width;                      // bytes of a lane
};

// A step of one thread: an access, or a meeting with others (then `buffer` is -1).
struct Step {
    int site, block, thread;
    int phase;                      // block barriers that the thread has passed
    int epoch, order;               // meetings of its warp that it has passed, and its steps since
    int bytes, has_value;
    uint64_t offset;                // in the buffer
    unsigned char value[16];        // what is read, or has been written
};

// A buffer: a tensor (by the number of its Range), or a part of shared memory.
struct Buffer { int range, is_static; uint64_t offset, bytes; };

void begin_block_trace();
void end_block_trace();
void trace_access(const char* what, bool write, const void* address, int bytes, const Range* range, const void* code);
void trace_bulk(const char* what, bool write, const void* address, int bytes, const Range* range);
void trace_meeting(const char* what, unsigned mask, int line, const void* code);   // of one warp, by its last lane to arrive
void trace_event(const char* what, bool counts, const void* code);       // of the current thread; `counts`: as an execution
// Of the current thread. The step's value has the buffer of the mbarrier, where in it that is, the phase, and `number`: announced bytes of
// an arrival, the parity of a wait
void trace_mbarrier(const char* what, unsigned address, unsigned phase, unsigned number, const void* code);
void trace_block_meeting();                                              // all threads of the block have met

}  // namespace emulator
