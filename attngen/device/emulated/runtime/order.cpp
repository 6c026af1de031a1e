// What is sure to have happened before what: vector clocks (Mattern 1989). Every thread, and every agent of the background, has a
// time; clock[i] is the time up to which a thread knows what i has done. A barrier hands on what is known; an access is ordered
// after another one if the thread knows the other's time (as in FastTrack, Flanagan and Freund 2009).
#include <algorithm>
#include <cstring>

#include "state.hpp"

namespace emulator {

namespace {

std::vector<unsigned> clocks;       // of all fibers
std::vector<Agent> agents;

// Of a clock: to a multiple of 32, as all times of such a group are read at once.
size_t capacity() { return (fibers.size() + MAX_AGENTS + 31) / 32 * 32; }

void join(unsigned* to, const unsigned* from) {
    const size_t n = clock_width();
    for (size_t i = 0; i < n; ++i) to[i] = std::max(to[i], from[i]);
}

}  // namespace

char Touch::library;

size_t clock_width() { return fibers.size() + agents.size(); }

void begin_block_order() {
    agents.clear();
    clocks.assign(fibers.size() * capacity(), 0);
    for (Fiber& f : fibers) {
        f.clock = &clocks[f.index * capacity()];
        f.clock[f.index] = 1;       // nobody knows yet what it does
        f.proxy_fences.clear();
        f.init_fences.clear();
        f.known_at_fence.clear();
        f.known_by_atomics.clear();
    }
}

Clock new_clock() { return Clock(capacity(), 0); }

int new_agent(Background kind, int thread) {
    if (agents.size() == MAX_AGENTS) report(Kind::BARRIER_MISUSE, "more mbarriers and TMA stores than the emulated device keeps apart", 0);
    agents.push_back({kind, thread});
    return int(clock_width()) - 1;
}

const Agent* agent_of(int thread) { return thread >= int(fibers.size()) ? &agents[thread - fibers.size()] : nullptr; }

// Whether TMA and wgmma see what a thread wrote: it has done a proxy fence since, and this is known too.
bool fenced(const Touch& before, const unsigned* clock) {
    if (before.thread < 0 || agent_of(before.thread)) return true;
    const auto& fences = fibers[before.thread].proxy_fences;
    const auto next = std::upper_bound(fences.begin(), fences.end(), before.time);
    return next != fences.end() && *next <= clock[before.thread];
}

void release(Clock& to) {
    join(to.data(), current->clock);
    ++current->clock[current->index];
}

void acquire(Fiber& fiber, const Clock& from) { join(fiber.clock, from.data()); }

void meet_all(int first, int count, unsigned mask) {
    static std::vector<unsigned> all;
    const auto takes_part = [&](int i) { return count > 32 || mask >> i & 1; };
    all.assign(clock_width(), 0);
    unsigned latest = 0;
    for (int i = 0; i < count; ++i) {
        if (!takes_part(i)) continue;
        const Fiber& f = fibers[first + i];
        join(all.data(), f.clock);
        latest = std::max(latest, f.clock[f.index]);
    }
    for (int i = 0; i < count; ++i) {
        if (!takes_part(i)) continue;
        Fiber& f = fibers[first + i];
        memcpy(f.clock, all.data(), clock_width() * sizeof(unsigned));
        f.clock[f.index] = latest + 1;  // the same for all: reads by the lanes of a warp are remembered together
    }
}

namespace {

void fence(std::vector<unsigned>& fences) {
    if (launch.checked) fences.push_back(++current->clock[current->index]);
}

}  // namespace

// As fences of C++ with relaxed atomic operations: what comes before the fence of one thread is known behind that of another, if the
// first then updates what the second one has updated or read by an atomic operation before its fence.
void thread_fence() {
    if (!launch.checked) return;
    Fiber& f = *current;
    if (!f.known_by_atomics.empty()) join(f.clock, f.known_by_atomics.data());
    f.known_at_fence.assign(f.clock, f.clock + capacity());
    ++f.clock[f.index];
}

void pass_on(Clock& of_address) {
    Fiber& f = *current;
    if (f.known_at_fence.empty() && of_address.empty()) return;
    for (Clock* clock : {&of_address, &f.known_by_atomics})
        if (clock->empty()) *clock = new_clock();
    if (!f.known_at_fence.empty()) join(of_address.data(), f.known_at_fence.data());
    join(f.known_by_atomics.data(), of_address.data());
}

void proxy_fence() { fence(current->proxy_fences); }
void mbarrier_init_fence() { fence(current->init_fences); }

}  // namespace emulator
