// The threads of a block as fibers, one block after another. Every wait of a fiber goes through here.
#include <cstdio>
#include <cstring>

#include "trace.hpp"

namespace emulator {

Position* running;
unsigned char* running_stack;
Launch launch;
std::vector<Fiber> fibers;
unsigned thread_count;
Fiber* current;
bool combining;
const void* collective_code;
Fiber* collective_last;

namespace {

unsigned char* stacks;              // of the fibers: a guard and a stack for each
void* scheduler_stack;
bool failed, tracing;
int votes, counted_votes;           // of a block: for its next barrier, and at the last one
void (*kernel)(void**);
void** kernel_arguments;
uint64_t random_state;

uint64_t next_random() {            // splitmix64 (Steele, Lea and Flood 2014)
    uint64_t z = (random_state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

void fiber_main() {
    kernel(kernel_arguments);
    end_thread_wgmma();
    end_thread_tma();
    current->state = State::DONE;
    switch_to_scheduler();
    __builtin_unreachable();
}

void start(Fiber& fiber, int index, dim3 block, dim3 block_size, dim3 grid) {
    const unsigned x = index % block_size.x, y = index / block_size.x % block_size.y, z = index / block_size.x / block_size.y;
    fiber.position = {{x, y, z}, block, block_size, grid};
    fiber.index = index;
    fiber.warp = index / 32;
    fiber.lane = index % 32;
    fiber.state = State::READY;
    memset(fiber.trace, 0, sizeof(fiber.trace));
    fiber.accesses = 0;
    fiber.has_waited = !launch.early;
    fiber.uncommitted.clear();
    fiber.groups.clear();
    fiber.stack_low = stacks + index * (GUARD_BYTES + STACK_BYTES) + GUARD_BYTES;
    fiber.stack_high = fiber.stack_low + STACK_BYTES;
    fiber.stack_pointer = prepare_stack(fiber.stack_low, fiber.stack_high, fiber_main);
}

void run(Fiber& fiber) {
    current = &fiber;
    running = &fiber.position;
    running_stack = fiber.stack_low;
    dispatches = dispatches + 1, in_thread = true;
    emulator_switch(&scheduler_stack, fiber.stack_pointer);
    in_thread = false;
}

void shuffle_order(std::vector<int>& order, bool permute) {
    if (!permute) return;
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[next_random() % i]);
}

void trace_calls(uint64_t (&trace)[TRACE]) { walk_calls(trace, TRACE); }

bool waits_for_the_same(const Fiber& a, const Fiber& b) {
    const bool at_barrier = a.state == State::AT_MBARRIER || a.state == State::AT_NAMED_BARRIER;
    return a.state == b.state && a.line == b.line && (!at_barrier || (a.barrier == b.barrier && a.parity == b.parity));
}

// Nothing can run: say what each group of threads waits for.
void report_deadlock() {
    const Fiber *first = nullptr, *ended = nullptr, *wants_registers = nullptr;
    Waiter waiters[WAITERS] = {};
    int count = 0;
    for (const Fiber& f : fibers) {
        const bool near = ended && first && ended->warp == first->warp;  // a lane of the same warp is to the point
        if (f.state == State::DONE && !near) ended = &f;
        if (f.state == State::AT_REGISTERS) wants_registers = &f;
        if (f.state == State::DONE) continue;
        if (!first) first = &f;
        const Fiber* group = &fibers[0];
        while (group != &f && (group->state == State::DONE || !waits_for_the_same(*group, f))) ++group;
        if (group != &f || count == WAITERS) continue;
        Waiter& w = waiters[count++];
        w.thread = f.index, w.line = f.line;
        snprintf(w.text, sizeof(w.text), "%s", f.what);
        if (f.state == State::AT_MBARRIER) describe_mbarrier(f, w);
        if (f.state == State::AT_NAMED_BARRIER) describe_named_barrier(f, w.text, sizeof(w.text));
        if (f.state != State::AT_BLOCK_BARRIER && f.state != State::AT_WARP) {
            tracing = true;
            run(const_cast<Fiber&>(f));
            tracing = false;
        }
        memcpy(w.trace, f.trace, sizeof(w.trace));
    }
    char text[64] = "";
    const bool innocent = ended && first && first->state == State::AT_WARP && ended->warp != first->warp;
    if (ended && !innocent) snprintf(text, sizeof(text), "thread %d has ended", ended->index);
    current = const_cast<Fiber*>(wants_registers ? wants_registers : first);
    record(wants_registers ? Kind::REGISTERS : Kind::DEADLOCK, text, current->line);
    Finding& finding = *launch.finding;
    finding.waiter_count = count;
    memcpy(finding.waiters, waiters, sizeof(waiters));
    memcpy(finding.trace, current->trace, sizeof(finding.trace));
}

// Lets those go on that wait for __activemask; false if nobody does.
bool open_active_masks() {
    bool found = false;
    for (Fiber& first : fibers) {
        if (first.state != State::AT_ACTIVE_MASK) continue;
        unsigned mask = 0;
        const auto is_along = [&](const Fiber& f) { return f.state == State::AT_ACTIVE_MASK && f.warp == first.warp && f.line == first.line; };
        for (const Fiber& f : fibers)
            if (is_along(f)) mask |= 1u << f.lane;
        for (Fiber& f : fibers)
            if (&f != &first && is_along(f)) f.mask = mask, f.state = State::READY;
        first.mask = mask, first.state = State::READY;
        found = true;
    }
    return found;
}

// Everybody has arrived at a block barrier, or ended: open it.
void open_block_barrier() {
    const Fiber *first = nullptr, *ended = nullptr;
    for (Fiber& f : fibers) {
        if (f.state == State::DONE) ended = &f;
        if (f.state == State::DONE) continue;
        if (!first) first = &f;
        if (f.line == first->line) continue;
        current = &f;
        return record(Kind::DIVERGENT_BARRIER, "threads of one block wait at different barriers", f.line, nullptr, first->line, nullptr, first->index);
    }
    if (ended) {
        char text[128];
        snprintf(text, sizeof(text), "thread %d waits at a block barrier and thread %d has ended", first->index, ended->index);
        current = const_cast<Fiber*>(first);
        return record(Kind::DIVERGENT_BARRIER, text, first->line, nullptr, 0, nullptr, ended->index);
    }
    ++launch.barriers;
    counted_votes = votes, votes = 0;
    if (launch.checked) meet_all(0, int(fibers.size()), ~0u);
    if (launch.traced) trace_block_meeting();
    for (Fiber& f : fibers) f.state = State::READY;
}

bool run_block(dim3 block, dim3 block_size, dim3 grid, size_t dynamic_bytes, bool permute) {
    const int count = block_size.x * block_size.y * block_size.z;
    begin_block_memory(dynamic_bytes, block, grid);
    votes = 0;
    for (int i = 0; i < count; ++i) start(fibers[i], i, block, block_size, grid);
    if (launch.checked) begin_block_order();
    if (launch.traced) begin_block_trace();
    begin_block_mbarriers();
    begin_block_warpgroups();
    begin_block_tma();
    begin_block_wgmma();
    std::vector<int> order(count);
    for (int i = 0; i < count; ++i) order[i] = i;
    shuffle_order(order, permute);
    while (!failed) {
        bool moved = false;
        int done = 0, at_barrier = 0;
        for (int i : order) {
            if (fibers[i].state == State::READY) {
                moved = true;
                run(fibers[i]);
                if (failed) return false;
                if (interrupted) return record(Kind::INTERRUPTED, "", current->line), false;
                if (permute && next_random() % 8 == 0) land_one_load(next_random() | 1);
                if (failed) return false;
            }
        }
        for (const Fiber& f : fibers) {
            done += f.state == State::DONE;
            at_barrier += f.state == State::AT_BLOCK_BARRIER;
        }
        if (done == count) {
            if (launch.traced) end_block_trace();
            return end_block_copies() && end_block_tma() && end_block_warpgroups();
        }
        if (at_barrier && done + at_barrier == count) {
            open_block_barrier();
            shuffle_order(order, permute);
        } else if (!moved && !open_active_masks() && !land_one_load(permute ? next_random() | 1 : 0)) {
            report_deadlock();
        } else if (permute && uses_mbarriers()) {
            shuffle_order(order, permute);
        }
    }
    return false;
}

bool run_grid(dim3 grid, dim3 block, size_t shared_bytes, bool permute) {
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x)
                if (!run_block({x, y, z}, block, grid, shared_bytes, permute)) return false;
    return true;
}

}  // namespace

bool Stacks::grow(unsigned wanted) {
    constexpr size_t EACH = GUARD_BYTES + STACK_BYTES;
    if (wanted <= count) return true;
    if (count) unmap_memory(memory, count * EACH);
    count = 0;
    memory = map_memory(wanted * EACH);
    if (!memory) return false;
    for (unsigned i = 0; i < wanted; ++i)
        if (!guard(memory + i * EACH + GUARD_BYTES)) return unmap_memory(memory, wanted * EACH), false;
    count = wanted;
    return true;
}

dim3 thread_position() { return running->thread; }
dim3 block_position() { return running->block; }
dim3 block_size() { return running->block_size; }
dim3 grid_size() { return running->grid; }
int lane_index() { return current->lane; }

void switch_to_scheduler() { emulator_switch(&current->stack_pointer, scheduler_stack); }

void wait_in(State state, const char* what, int line) {
    if (!tracing) spend(WAIT_COST, line, __builtin_return_address(0));
    current->state = state;
    current->line = line;
    current->what = what;
    switch_to_scheduler();
    if (tracing) {                  // a deadlock is being reported
        trace_calls(current->trace);
        switch_to_scheduler();
    }
}

void block_barrier(int line) {
    spend(BLOCK_BARRIER_COST, line, __builtin_return_address(0));
    if (launch.traced) trace_event("block barrier", current->index == 0, __builtin_return_address(0));
    current->state = State::AT_BLOCK_BARRIER;
    current->line = line;
    current->what = "the block barrier";
    switch_to_scheduler();
}

int block_count(bool vote, int line) {
    votes += vote;
    block_barrier(line);
    return counted_votes;
}

unsigned active_mask(int line) {
    wait_in(State::AT_ACTIVE_MASK, "__activemask", line);
    return current->mask;
}

void warp_collective(const char* what, int line, unsigned mask, const void* in, void* out, Combine combine) {
    spend(WARP_COST, line, __builtin_return_address(0));
    Fiber& self = *current;
    if (!(mask >> self.lane & 1)) report(Kind::OPERAND, "a lane comes to an operation of its warp whose mask does not name it", line, __builtin_return_address(0));
    self.state = State::AT_WARP;
    self.line = line;
    self.what = what;
    self.mask = mask;
    self.lane_arguments = {in, out};
    Fiber* const warp = &fibers[self.warp * 32];
    const int lanes = int(fibers.size()) - self.warp * 32 < 32 ? int(fibers.size()) - self.warp * 32 : 32;
    for (int i = 0; i < lanes; ++i) {
        if (!(mask >> i & 1)) continue;
        const Fiber& other = warp[i];
        const bool arrived = other.state == State::AT_WARP && other.line == line && other.what == what && other.mask == mask;
        if (!arrived) {
            switch_to_scheduler();
            return;
        }
    }
    Lane all[32] = {};
    for (int i = 0; i < lanes; ++i)
        if (mask >> i & 1) all[i] = warp[i].lane_arguments;
    collective_code = __builtin_return_address(0), collective_last = &self;
    combining = true;
    combine(all, line);
    combining = false;
    if (launch.traced) trace_meeting(what, mask, line, collective_code);
    for (int i = 0; i < lanes; ++i)
        if (mask >> i & 1) warp[i].state = State::READY;
}

void stop_kernel(const char* text, int line) { report(Kind::TRAP, text, line, __builtin_return_address(0)); }

void read_of_no_lane(int line) {
    combining = false;
    report(Kind::OPERAND, "a shuffle reads from a lane that its mask does not name, or that the block does not have", line, collective_code);
}

void warp_barrier(int line, unsigned mask) {
    char nothing = 0;
    warp_collective("the warp barrier", line, mask, &nothing, &nothing, [](Lane (&)[32], int) {
        const int first = current->warp * 32, left = int(fibers.size()) - first;
        if (launch.checked) meet_all(first, left < 32 ? left : 32, current->mask);
        ++launch.barriers;
    });
}

void record(Kind kind, const char* text, int line, const void* code, int other_line, const void* other_code, int other_thread,
            const void* address, int bytes) {
    Finding& finding = *launch.finding;
    const dim3 block = current->position.block;
    finding.kind = int(kind);
    finding.line = line, finding.other_line = other_line;
    finding.code = (uint64_t)code, finding.other_code = (uint64_t)other_code;
    finding.thread = current->index, finding.other_thread = other_thread;
    finding.block[0] = block.x, finding.block[1] = block.y, finding.block[2] = block.z;
    finding.address = (uint64_t)address, finding.bytes = bytes;
    snprintf(finding.text, sizeof(finding.text), "%s", text);
    failed = true;
}

void report(Kind kind, const char* text, int line, const void* code, int other_line, const void* other_code, int other_thread,
            const void* address, int bytes) {
    record(kind, text, line, code, other_line, other_code, other_thread, address, bytes);
    trace_calls(launch.finding->trace);
    switch_to_scheduler();
    __builtin_unreachable();
}

}  // namespace emulator

// The entry from Python: run one launch. Returns 0, or 1 with `finding` filled in.
EXPORTED int emulator_launch(void (*kernel)(void**), void** arguments, const unsigned* grid, const unsigned* block, size_t shared_bytes,
                             emulator::Range* ranges, int range_count, uint64_t seed, int mode, uint64_t budget, int first_of_call, int early,
                             uint64_t* instruction_counts, uint64_t* totals, emulator::Stacks* of_process, emulator::Finding* finding) {
    using namespace emulator;
    const unsigned count = block[0] * block[1] * block[2];
    if (!of_process->grow(count)) return 2;
    stacks = of_process->memory;
    fibers.resize(count);
    thread_count = count;
    const bool checked = mode >= 1;                    // 0: neither watched nor counted; 2: traced too
    launch.checked = checked, launch.traced = mode == 2, launch.early = early, launch.budget = budget, launch.finding = finding;
    launch.ranges = ranges, launch.range_count = range_count, launch.instruction_counts = instruction_counts;
    launch.shared_read = launch.shared_written = launch.barriers = 0;
    launch.sequence = first_of_call ? 1 : launch.sequence + 1;
    if (checked && first_of_call) {
        launch.writers.assign(range_count, {});
        for (int i = 0; i < range_count; ++i)
            if (ranges[i].writable) launch.writers[i].assign(ranges[i].bytes / 2 + 1, 0);
    }
    ::emulator::kernel = kernel, kernel_arguments = arguments;
    failed = combining = false, random_state = seed;
    memset(finding, 0, sizeof(*finding));
    reserve_shared(shared_bytes);
    begin_stops();
    const bool ran = run_grid({grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared_bytes, seed != 0);
    end_stops();
    fflush(stdout);                 // what the kernel has printed
    if (!ran) return 1;
    totals[0] += launch.shared_read, totals[1] += launch.shared_written, totals[2] += launch.barriers;
    return 0;
}

// For Python: where this library is loaded.
EXPORTED const void* emulator_library() { return emulator::library_of(&emulator::Touch::library); }
