// The threads of a block as fibers, one block after another. Every wait of a fiber goes through here.
#include <cstdio>
#include <cstring>
#include <sys/mman.h>

#include "state.hpp"
#include "switch.hpp"

namespace emulator {

Position* running;
Launch launch;
std::vector<Fiber> fibers;
Fiber* current;
std::vector<unsigned> warp_epochs;
bool combining;

namespace {

constexpr size_t STACK_BYTES = 256 * 1024;
std::vector<unsigned char*> stacks;
void* scheduler_stack;
bool failed;
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
    fiber.block_epoch = 0;
    fiber.accesses = 0;
    fiber.uncommitted.clear();
    fiber.groups.clear();
    fiber.stack_low = stacks[index];
    fiber.stack_high = stacks[index] + STACK_BYTES;
    fiber.stack_pointer = prepare_stack(fiber.stack_high, fiber_main);
}

void run(Fiber& fiber) {
    current = &fiber;
    running = &fiber.position;
    emulator_switch(&scheduler_stack, fiber.stack_pointer);
}

void shuffle_order(std::vector<int>& order, bool permute) {
    if (!permute) return;
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[next_random() % i]);
}

// Nothing can run: say what each group of threads waits for.
void report_deadlock() {
    char text[256];
    int used = 0;
    const Fiber* first = nullptr;
    for (const Fiber& f : fibers) {
        if (f.state == State::DONE) continue;
        if (!first) first = &f;
        const bool seen = [&] {
            for (const Fiber& g : fibers) {
                if (&g == &f) return false;
                if (g.state == f.state && g.line == f.line) return true;
            }
            return false;
        }();
        if (seen || used > 200) continue;
        used += snprintf(text + used, sizeof(text) - used, "%sthread %d waits for %s at line %d", used ? "; " : "", f.index, f.what, f.line);
    }
    for (const Fiber& f : fibers)
        if (f.state == State::DONE && used < 200) {
            snprintf(text + used, sizeof(text) - used, "; thread %d has ended", f.index);
            break;
        }
    current = const_cast<Fiber*>(first);
    Finding& finding = *launch.finding;
    finding.kind = int(Kind::DEADLOCK);
    finding.line = first->line;
    finding.thread = first->index;
    finding.other_thread = -1;
    finding.block[0] = first->position.block.x, finding.block[1] = first->position.block.y, finding.block[2] = first->position.block.z;
    snprintf(finding.text, sizeof(finding.text), "%s", text);
    failed = true;
}

// Everybody has arrived at a block barrier, or ended: open it.
void open_block_barrier() {
    const Fiber* first = nullptr;
    for (Fiber& f : fibers) {
        if (f.state == State::DONE) continue;
        if (!first) first = &f;
        if (f.line != first->line) {
            current = &f;
            Finding& finding = *launch.finding;
            finding.kind = int(Kind::DIVERGENT_BARRIER);
            finding.line = f.line, finding.thread = f.index;
            finding.other_line = first->line, finding.other_thread = first->index;
            finding.block[0] = f.position.block.x, finding.block[1] = f.position.block.y, finding.block[2] = f.position.block.z;
            snprintf(finding.text, sizeof(finding.text), "threads of one block wait at different barriers");
            failed = true;
            return;
        }
    }
    for (Fiber& f : fibers)
        if (f.state == State::DONE) {
            Finding& finding = *launch.finding;
            finding.kind = int(Kind::DIVERGENT_BARRIER);
            finding.line = first->line, finding.thread = first->index, finding.other_thread = f.index;
            finding.block[0] = f.position.block.x, finding.block[1] = f.position.block.y, finding.block[2] = f.position.block.z;
            snprintf(finding.text, sizeof(finding.text), "thread %d waits at a block barrier and thread %d has ended", first->index, f.index);
            failed = true;
            return;
        }
    ++launch.barriers;
    for (Fiber& f : fibers) {
        f.state = State::READY;
        ++f.block_epoch;
    }
}

bool run_block(dim3 block, dim3 block_size, dim3 grid, size_t dynamic_bytes, bool permute) {
    const int count = block_size.x * block_size.y * block_size.z;
    begin_block_memory(dynamic_bytes);
    warp_epochs.assign((count + 31) / 32, 0);
    for (int i = 0; i < count; ++i) start(fibers[i], i, block, block_size, grid);
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
            }
        }
        for (const Fiber& f : fibers) {
            done += f.state == State::DONE;
            at_barrier += f.state == State::AT_BLOCK_BARRIER;
        }
        if (done == count) return true;
        if (at_barrier && done + at_barrier == count) {
            open_block_barrier();
            shuffle_order(order, permute);
        } else if (!moved) {
            report_deadlock();
        }
    }
    return false;
}

}  // namespace

dim3 thread_position() { return running->thread; }
dim3 block_position() { return running->block; }
dim3 block_size() { return running->block_size; }
dim3 grid_size() { return running->grid; }
int lane_index() { return current->lane; }

void switch_to_scheduler() { emulator_switch(&current->stack_pointer, scheduler_stack); }

void leave_block() {
    failed = true;
    switch_to_scheduler();
    __builtin_unreachable();
}

void block_barrier(int line) {
    current->state = State::AT_BLOCK_BARRIER;
    current->line = line;
    current->what = "the block barrier";
    switch_to_scheduler();
}

void warp_collective(const char* what, int line, unsigned mask, const void* in, void* out, Combine combine) {
    Fiber& self = *current;
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
    combining = true;
    combine(all, line);
    combining = false;
    for (int i = 0; i < lanes; ++i)
        if (mask >> i & 1) warp[i].state = State::READY;
}

void warp_barrier(int line, unsigned mask) {
    char nothing = 0;
    warp_collective("the warp barrier", line, mask, &nothing, &nothing, [](Lane (&)[32], int) {
        ++warp_epochs[current->warp];
        ++launch.barriers;
    });
}

void report(Kind kind, const char* text, int line, const void* code, int other_line, const void* other_code, int other_thread,
            const void* address, int bytes) {
    Finding& finding = *launch.finding;
    finding.kind = int(kind);
    finding.line = line, finding.other_line = other_line;
    finding.code = (uint64_t)code, finding.other_code = (uint64_t)other_code;
    finding.thread = current->index, finding.other_thread = other_thread;
    finding.block[0] = running->block.x, finding.block[1] = running->block.y, finding.block[2] = running->block.z;
    finding.address = (uint64_t)address, finding.bytes = bytes;
    snprintf(finding.text, sizeof(finding.text), "%s", text);
    leave_block();
}

}  // namespace emulator

// The entry from Python: run one launch. Returns 0, or 1 with `finding` filled in.
extern "C" int emulator_launch(void (*kernel)(void**), void** arguments, const unsigned* grid, const unsigned* block, size_t shared_bytes,
                               emulator::Range* ranges, int range_count, uint64_t seed, int checked, uint64_t budget, int first_of_call,
                               uint64_t* instruction_counts, uint64_t* totals, emulator::Finding* finding) {
    using namespace emulator;
    const unsigned count = block[0] * block[1] * block[2];
    while (stacks.size() < count) {
        void* memory = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return 2;
        stacks.push_back((unsigned char*)memory);
    }
    fibers.resize(count);
    launch.checked = checked, launch.budget = budget, launch.finding = finding;
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
    for (unsigned z = 0; z < grid[2]; ++z)
        for (unsigned y = 0; y < grid[1]; ++y)
            for (unsigned x = 0; x < grid[0]; ++x)
                if (!run_block({x, y, z}, {block[0], block[1], block[2]}, {grid[0], grid[1], grid[2]}, shared_bytes, seed != 0)) return 1;
    totals[0] += launch.shared_read, totals[1] += launch.shared_written, totals[2] += launch.barriers;
    return 0;
}
