// mbarriers (PTX ISA, "Parallel synchronization: mbarrier"): phases that end when the announced arrivals and bytes are there.
#include <algorithm>
#include <cstdio>
#include <map>

#include "trace.hpp"

namespace emulator {

namespace {

constexpr long long MAX_BYTES = (1 << 20) - 1;      // of one phase: PTX ISA, "tx-count"

struct Mbarrier {
    unsigned address, expected, pending;
    long long bytes;                // announced and not there yet
    unsigned phase;                 // how many have ended
    int agent;                      // whose time is `phase`: it writes what copies bring
    Touch init;
    Clock arriving, released;       // what those know who have arrived in this phase, and in the phases before
};

std::map<unsigned, Mbarrier> mbarriers;

[[noreturn]] void misuse(const char* text, int line, unsigned address) {
    report(Kind::BARRIER_MISUSE, text, line, nullptr, 0, nullptr, -1, shared_pointer(address), 8);
}

Mbarrier& find(unsigned address, int line) {
    const auto found = mbarriers.find(address);
    if (found == mbarriers.end()) misuse("no mbarrier has been initialized at this address", line, address);
    Mbarrier& b = found->second;
    if (launch.checked && !ordered(b.init, current->clock))
        report(Kind::RACE, "an mbarrier is used, with no barrier after its initialization", line, nullptr, b.init.line, nullptr, b.init.thread, shared_pointer(address), 8);
    return b;
}

void end_phase_if_complete(Mbarrier& b) {
    if (b.pending || b.bytes) return;
    ++b.phase;
    b.pending = b.expected;
    if (launch.checked) {
        for (size_t i = 0; i < b.released.size(); ++i) b.released[i] = std::max(b.released[i], b.arriving[i]);
        b.released[b.agent] = b.phase;
        std::fill(b.arriving.begin(), b.arriving.end(), 0);
    }
    wake(State::AT_MBARRIER, [&](const Fiber& f) { return f.barrier == b.address && f.parity != (b.phase & 1); });
}

}  // namespace

void begin_block_mbarriers() { mbarriers.clear(); }
bool uses_mbarriers() { return !mbarriers.empty(); }

void mbarrier_init(unsigned address, unsigned arrivals, int line) {
    if (address % 8) report(Kind::MISALIGNED, "an mbarrier whose address is not a multiple of 8", line, nullptr, 0, nullptr, -1, shared_pointer(address), 8);
    if (!arrivals || arrivals > MAX_BYTES) misuse("an mbarrier of no arrivals, or of too many", line, address);
    if (mbarriers.count(address)) misuse("an mbarrier is initialized a second time", line, address);
    keep_for_mbarrier(address, line);
    Mbarrier& b = mbarriers[address];
    b = {address, arrivals, arrivals, 0, 0, -1, {}, {}, {}};
    if (!launch.checked) return;
    b.agent = new_agent(Background::TMA_LOAD, current->index);
    b.init = touch(line, nullptr);
    b.arriving = b.released = new_clock();
}

void mbarrier_arrive(unsigned address, unsigned bytes, int line) {
    Mbarrier& b = find(address, line);
    if (launch.traced) trace_mbarrier("mbarrier arrive", address, b.phase, bytes, __builtin_return_address(0));
    if (!b.pending) misuse("more threads arrive at an mbarrier in one phase than it expects", line, address);
    --b.pending;
    b.bytes += bytes;
    if (b.bytes > MAX_BYTES) misuse("more bytes are announced in one phase of an mbarrier than it can count", line, address);
    if (launch.checked) release(b.arriving);
    end_phase_if_complete(b);
}

void mbarrier_wait(unsigned address, unsigned parity, int line) {
    Mbarrier& b = find(address, line);
    spend(WARP_COST, line, __builtin_return_address(0));
    if (launch.traced) trace_mbarrier("mbarrier wait", address, b.phase, parity, __builtin_return_address(0));
    while ((b.phase & 1) == parity) {
        current->barrier = address, current->parity = parity;
        wait_in(State::AT_MBARRIER, "an mbarrier", line);
    }
    if (launch.checked) acquire(*current, b.released);
}

Ticket ticket(unsigned barrier, int line) {
    Mbarrier& b = find(barrier, line);
    if (launch.checked) {
        const auto seen = [&](const std::vector<unsigned>& fences) {
            const auto next = std::upper_bound(fences.begin(), fences.end(), b.init.time);
            return next != fences.end() && *next <= current->clock[b.init.thread];
        };
        const Fiber& first = fibers[b.init.thread];
        if (!seen(first.init_fences) && !seen(first.proxy_fences))
            report(Kind::PROXY_FENCE, "a TMA load counts at an mbarrier, and no fence comes between its initialization and this", line, nullptr,
                   b.init.line, nullptr, b.init.thread, shared_pointer(barrier), 8);
    }
    return {barrier, b.phase, {b.agent, b.phase + 1, nullptr, line}};
}

bool bring_bytes(const Ticket& ticket, int bytes, int line) {
    Mbarrier& b = mbarriers.at(ticket.barrier);
    b.bytes -= bytes;
    const char* wrong = b.phase != ticket.phase          ? "a TMA load brings bytes after the phase of its mbarrier has ended: more must be announced"
                        : b.bytes < 0 && !b.pending      ? "TMA loads bring more bytes in one phase than were announced"
                                                         : nullptr;
    if (wrong) record(Kind::BARRIER_MISUSE, wrong, line, nullptr, 0, nullptr, -1, shared_pointer(b.address), 8);
    if (!wrong) end_phase_if_complete(b);
    return !wrong;
}

void describe_mbarrier(const Fiber& fiber, Waiter& waiter) {
    const Mbarrier& b = mbarriers.at(fiber.barrier);
    waiter.address = (uint64_t)shared_pointer(b.address);
    snprintf(waiter.text, sizeof(waiter.text), "the phase of parity %u of the mbarrier at {}, which is in phase %u and lacks %u of %u arrivals and %lld bytes",
             fiber.parity, b.phase, b.pending, b.expected, b.bytes);
}

}  // namespace emulator
