// Barriers of some warps (PTX ISA, "bar{.cta}") and registers that move between warpgroups ("setmaxnreg").
#include <algorithm>
#include <cstdio>

#include "trace.hpp"

namespace emulator {

namespace {

constexpr int BARRIERS = 16;
constexpr int REGISTER_FILE = 65536, REGISTER_STEP = 8, MIN_REGISTERS = 24, MAX_REGISTERS = 256;

struct NamedBarrier {
    unsigned expected = 0;          // 0: nobody is here
    std::vector<int> here;          // threads
    unsigned votes = 0;
    Clock clock;
};
NamedBarrier named[BARRIERS];

struct WarpRegisters { unsigned each; int changes; std::vector<int> lane_changes; };
std::vector<WarpRegisters> warps;
int free_registers;

void open(NamedBarrier& b, unsigned id) {
    wake(State::AT_NAMED_BARRIER, [&](Fiber& f) {
        if (f.barrier != id) return false;
        if (launch.checked) acquire(f, b.clock);
        f.votes = b.votes;
        return true;
    });
    b = NamedBarrier();
    ++launch.barriers;
}

}  // namespace

void begin_block_warpgroups() {
    for (NamedBarrier& b : named) b = NamedBarrier();
    const int threads = int(fibers.size());
    const unsigned entry = std::min(MAX_REGISTERS, REGISTER_FILE / threads / REGISTER_STEP * REGISTER_STEP);
    warps.assign((threads + 31) / 32, {entry, 0, std::vector<int>(32)});
    free_registers = 0;
}

unsigned named_barrier(unsigned id, unsigned threads, bool waits, int line, bool vote) {
    if (id >= BARRIERS) report(Kind::OPERAND, "a named barrier whose number is not 0 to 15", line);
    if (!threads || threads % 32 || threads > (fibers.size() + 31) / 32 * 32)
        report(Kind::OPERAND, "a named barrier of a number of threads that is not a multiple of 32, or more than the block has", line);
    NamedBarrier& b = named[id];
    if (launch.traced) trace_event(waits ? "named barrier" : "named barrier, arrive", current->lane == 0, __builtin_return_address(0));
    if (b.expected && b.expected != threads)
        report(Kind::DIVERGENT_BARRIER, "threads come to one named barrier with different counts", line, nullptr, 0, nullptr, b.here[0]);
    if (std::count(b.here.begin(), b.here.end(), current->index))
        report(Kind::DIVERGENT_BARRIER, "a thread comes to a named barrier a second time before it has opened", line);
    b.expected = threads;
    b.here.push_back(current->index);
    b.votes += vote;
    if (launch.checked) {
        if (b.clock.empty()) b.clock = new_clock();
        release(b.clock);
    }
    if (b.here.size() == threads) {
        if (launch.checked && waits) acquire(*current, b.clock);
        current->votes = b.votes;
        open(b, id);
    } else if (waits) {
        current->barrier = id;
        wait_in(State::AT_NAMED_BARRIER, "a named barrier", line);
    }
    return current->votes;
}

void describe_named_barrier(const Fiber& fiber, char* text, size_t size) {
    const NamedBarrier& b = named[fiber.barrier];
    snprintf(text, size, "the named barrier %u, where %zu of %u threads are", fiber.barrier, b.here.size(), b.expected);
}

// The first lane of a warp that comes moves the whole warp's registers.
void set_registers(bool take, unsigned registers, int line) {
    if (registers % REGISTER_STEP || registers < MIN_REGISTERS || registers > MAX_REGISTERS)
        report(Kind::OPERAND, "setmaxnreg wants a multiple of 8 from 24 to 256", line);
    WarpRegisters& warp = warps[current->warp];
    const int mine = ++warp.lane_changes[current->lane];
    while (warp.changes < mine) {
        if (take ? registers < warp.each : registers > warp.each) report(Kind::OPERAND, take ? "take_registers of fewer than there are" : "give_registers of more than there are", line);
        const int more = 32 * (int(registers) - int(warp.each));
        if (more <= free_registers) {
            free_registers -= more;
            warp.each = registers, ++warp.changes;
            wake(State::AT_REGISTERS, [](const Fiber&) { return true; });
        } else {
            wait_in(State::AT_REGISTERS, "registers that other warpgroups have not given", line);
        }
    }
    if (warp.each != registers) report(Kind::DIVERGENT_WARPGROUP, "lanes of one warp change their number of registers differently", line);
}

// Whether all four warps of each warpgroup have changed their registers alike.
bool end_block_warpgroups() {
    for (size_t i = 0; i < warps.size(); ++i) {
        const WarpRegisters &warp = warps[i], &first = warps[i / 4 * 4];
        if (warp.changes == first.changes && warp.each == first.each) continue;
        current = &fibers[i * 32];
        record(Kind::DIVERGENT_WARPGROUP, "warps of one warpgroup have changed their number of registers differently", 0, nullptr, 0, nullptr, int(i / 4 * 128));
        return false;
    }
    return true;
}

}  // namespace emulator
