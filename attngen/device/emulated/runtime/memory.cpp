// Every access to memory. A checked kernel is compiled with -fsanitize=thread but not linked with its runtime: the compiler then
// calls the functions at the end of this file before each access, and what they check is ours.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <unordered_map>

#include "trace.hpp"

namespace emulator {

namespace {

constexpr size_t ALIGNMENT = 1024;
constexpr int GRANULE = 2;                          // bytes of a Cell
constexpr int MBARRIER = -2;                        // in_flight of a Cell that belongs to one
constexpr unsigned char GARBAGE = 0xff;             // uninitialized memory reads as NaN where it is not checked

std::vector<unsigned char> storage;
unsigned char* dynamic_low;
size_t dynamic_bytes;
std::vector<Cell> dynamic_cells, static_cells;
int last_range;

unsigned char *static_low, *static_high;            // the static __shared__ arrays

Cell* cells_of(const unsigned char* address, int bytes) {
    if (address >= dynamic_low && address + bytes <= dynamic_low + dynamic_bytes) return &dynamic_cells[(address - dynamic_low) / GRANULE];
    if (address >= static_low && address + bytes <= static_high) return &static_cells[(address - static_low) / GRANULE];
    return nullptr;
}

// `now` is an access of the current thread, or one of the background that is known to come after what `clock` knows.
struct Access { const void* address; int bytes, line; const void* code; const unsigned* clock; Touch now; bool background; };

// The times up to which the current thread knows all of a group of 32; what a thread knows only grows.
const unsigned* knowing;
unsigned known_of_group[MAX_GROUPS];

__attribute__((noinline)) bool ordered_lanes(const Readers& before, const Access& a) {
    const unsigned* const of_group = a.clock + before.group * 32;
    if (!a.background) {
        if (knowing != a.clock) knowing = a.clock, memset(known_of_group, 0, sizeof(known_of_group));
        unsigned least = ~0u;
        for (int i = 0; i < 32; ++i) least = std::min(least, of_group[i]);
        known_of_group[before.group] = least;
        if (before.time <= least) return true;
    }
    for (unsigned left = before.lanes; left; left &= left - 1)
        if (before.time > of_group[__builtin_ctz(left)]) return false;
    return true;
}

inline bool ordered(const Readers& before, const Access& a) {
    return (knowing == a.clock && !a.background && before.time <= known_of_group[before.group]) || ordered_lanes(before, a);
}

// Statements that read, by Readers::place.
struct Place { int code_offset, line; };
std::vector<Place> places;
std::unordered_map<uint64_t, unsigned> known_places;

unsigned place_of(const Touch& t) {
    static struct { uint64_t key = ~0ull; unsigned place; } last[256];
    const uint64_t key = uint64_t(t.line) << 32 | unsigned(t.code_offset);
    auto& slot = last[(key ^ key >> 8 ^ key >> 32) % 256];
    if (slot.key == key) return slot.place;
    const auto [found, is_new] = known_places.try_emplace(key, unsigned(places.size()));
    if (is_new) places.push_back({t.code_offset, int(t.line)});
    slot.key = key;
    return slot.place = found->second;
}

// One of these reads that is not sure to come before `a`.
Touch unordered_of(const Readers& readers, const Access& a) {
    unsigned left = readers.lanes;
    while (readers.time <= a.clock[readers.group * 32 + __builtin_ctz(left)]) left &= left - 1;
    const Place& place = places[readers.place];
    Touch found(int(readers.group * 32) + __builtin_ctz(left), readers.time, nullptr, place.line);
    found.code_offset = place.code_offset;
    return found;
}

// `other` is not sure to come before this access.
[[noreturn]] void conflict(const char* text, const Touch& other, const Access& a) {
    const Agent* agent = agent_of(other.thread);
    if (!agent) report(Kind::RACE, text, a.line, a.code, other.line, other.code(), other.thread, a.address, a.bytes);
    const char* what = agent->kind == Background::TMA_LOAD    ? "a TMA load writes this memory, and no wait for its mbarrier comes before"
                       : agent->kind == Background::TMA_STORE ? "a TMA store reads this memory, and no wait for it comes before"
                                                              : "a wgmma reads this memory, and no wait for it comes before";
    report(Kind::IN_FLIGHT, what, a.line, a.code, other.line, nullptr, agent->thread, a.address, a.bytes);
}

// From where the copy into this memory was issued that is still under way.
const void* code_of_copy(const Fiber& fiber, const unsigned char* address, int bytes) {
    const void* code = nullptr;
    const auto look = [&](const std::vector<Copy>& copies) {
        for (const Copy& c : copies)
            if (c.to < address + bytes && address < c.to + c.bytes) code = c.code;
    };
    for (const auto& group : fiber.groups) look(group);
    look(fiber.uncommitted);
    return code;
}

__attribute__((noinline, cold)) void check_flight(const Cell& cell, const Access& a) {
    if (cell.in_flight == MBARRIER) report(Kind::BARRIER_MISUSE, "an mbarrier is read or written as if it were data", a.line, a.code, 0, nullptr, -1, a.address, a.bytes);
    if (cell.in_flight >= 0)
        report(Kind::IN_FLIGHT, "an asynchronous copy into this memory has not been waited for", a.line, a.code, 0,
               code_of_copy(fibers[cell.in_flight], (const unsigned char*)a.address, a.bytes), cell.in_flight, a.address, a.bytes);
}

// Reads that no Cell has room for, by Cell::overflow.
std::vector<std::vector<Readers>> overflows;

// All reads since the last write, but those known to a later one: a write that comes after the later read comes after them too. So
// none is forgotten that a write may race with.
void remember_reader(Cell& cell, const Access& a, unsigned place) {
    const Readers now{a.now.time, 1u << a.now.thread % 32, unsigned(a.now.thread) / 32, place};
    const auto is_known = [&](Readers& r) {
        if (r.group != now.group || r.time != now.time) return false;
        if (r.lanes & now.lanes) return true;
        if (r.place != place) return false;
        r.lanes |= now.lanes;
        return true;
    };
    int count = 0;
    for (; count < Cell::ROOM && cell.readers[count].lanes; ++count)
        if (is_known(cell.readers[count])) return;
    if (cell.overflow)
        for (Readers& r : overflows[cell.overflow])
            if (is_known(r)) return;
    int kept = 0;
    for (int i = 0; i < count; ++i)
        if (!ordered(cell.readers[i], a)) cell.readers[kept++] = cell.readers[i];
    for (int i = kept; i < count; ++i) cell.readers[i].lanes = 0;
    if (cell.overflow) {
        auto& rest = overflows[cell.overflow];
        rest.erase(std::remove_if(rest.begin(), rest.end(), [&](const Readers& r) { return ordered(r, a); }), rest.end());
    }
    if (kept < Cell::ROOM) {
        cell.readers[kept] = now;
        return;
    }
    if (!cell.overflow) cell.overflow = overflows.size(), overflows.emplace_back();
    overflows[cell.overflow].push_back(now);
}

void forget_readers(Cell& cell) {
    for (Readers& r : cell.readers) r.lanes = 0;
    if (cell.overflow) overflows[cell.overflow].clear();
}

void check_fenced(const Cell& cell, const Access& a) {
    if (a.background && !fenced(cell.writer, a.clock))
        report(Kind::PROXY_FENCE, "a thread wrote this memory, and no proxy fence of it comes before TMA or wgmma use it", a.line, a.code,
               cell.writer.line, cell.writer.code(), cell.writer.thread, a.address, a.bytes);
}

// What a Cell has no room for.
struct More {
    std::unique_ptr<Cell> second;       // of the second byte, once one of the two has been accessed by itself
    std::vector<Touch> updates;         // atomic ones since the last write: the latest of each thread
    Touch written;                      // that write
    Clock known;                        // of an atomic update's first byte: what fences and updates pass on
};
std::unordered_map<const Cell*, More> more;

More& more_of(Cell& cell) { return cell.has_more = true, more[&cell]; }

Cell& second_byte(Cell& cell) {
    More& first = more_of(cell);
    if (!first.second) {
        first.second = std::make_unique<Cell>(cell);
        if (cell.overflow) {
            first.second->overflow = overflows.size();
            overflows.push_back(std::vector<Readers>(overflows[cell.overflow]));
        }
        More& copy = more[first.second.get()];
        copy.updates = first.updates, copy.written = first.written;
    }
    return *first.second;
}

// Calls `visit` with the Cell of each byte that is accessed, from the one of the first byte on.
template <typename Visit> __attribute__((noinline, cold)) void each_byte(Cell* cell, const Access& a, Visit visit) {
    const auto begin = (uint64_t)a.address, end = begin + a.bytes;
    for (uint64_t at = begin - begin % GRANULE; at < end; at += GRANULE, ++cell) {
        const bool first = at >= begin, second = at + 1 < end, is_split = cell->has_more && more[cell].second;
        Cell* const other = is_split || first != second ? &second_byte(*cell) : nullptr;
        if (first) visit(*cell);
        if (second && other) visit(*other);
    }
}

// The same, fast where no byte has a Cell of its own.
template <typename Visit> inline void each_cell(Cell* cell, const Access& a, Visit visit) {
    bool has_more = ((uint64_t)a.address | a.bytes) % GRANULE;
    for (int i = 0; i < a.bytes; i += GRANULE) has_more |= cell[i / GRANULE].has_more;
    if (has_more) return each_byte(cell, a, visit);
    for (int i = 0; i < a.bytes; i += GRANULE, ++cell) visit(*cell);
}

void check_updates(const Cell& cell, const char* text, const Access& a) {
    if (!cell.has_more) return;
    for (const Touch& update : more[&cell].updates)
        if (!ordered(update, a.clock)) conflict(text, update, a);
}

void check_written(const Cell& cell, const Access& a) {
    if (!cell.initialized) report(Kind::UNINITIALIZED_SHARED, "shared memory is read that no thread has written yet: the write, or the barrier behind it, is missing", a.line, a.code, 0, nullptr, -1, a.address, a.bytes);
}

void shared_read(Cell* first, const Access& a) {
    launch.shared_read += a.bytes;
    const unsigned place = place_of(a.now);
    each_cell(first, a, [&](Cell& cell) {
        if (cell.in_flight != -1) check_flight(cell, a);
        check_written(cell, a);
        constexpr const char* text = "a read and an earlier write of shared memory, with no barrier between them";
        if (!ordered(cell.writer, a.clock)) conflict(text, cell.writer, a);
        check_updates(cell, text, a);
        check_fenced(cell, a);
        remember_reader(cell, a, place);
    });
}

void check_readers(const Cell& cell, const Access& a) {
    const auto check = [&](const Readers& readers) {
        if (readers.lanes && !ordered(readers, a))
            conflict("a write and an earlier read of shared memory, with no barrier between them", unordered_of(readers, a), a);
    };
    if (cell.overflow)
        for (const Readers& readers : overflows[cell.overflow]) check(readers);
    for (int i = Cell::ROOM - 1; i >= 0; --i) check(cell.readers[i]);    // the latest first
}

void check_overwrite(const Cell& cell, const Access& a) {
    constexpr const char* text = "two writes of shared memory, with no barrier between them";
    if (cell.in_flight != -1) check_flight(cell, a);
    if (!ordered(cell.writer, a.clock)) conflict(text, cell.writer, a);
    check_updates(cell, text, a);
    check_readers(cell, a);
    check_fenced(cell, a);
}

void shared_write(Cell* first, const Access& a) {
    launch.shared_written += a.bytes;
    each_cell(first, a, [&](Cell& cell) {
        check_overwrite(cell, a);
        forget_readers(cell);
        cell.writer = a.now;
        cell.initialized = true;
        if (cell.has_more) more[&cell].updates.clear();
    });
}

// Atomic updates need no order among themselves, but one with ordinary accesses.
void shared_update(Cell* first, const Access& a) {
    launch.shared_read += a.bytes, launch.shared_written += a.bytes;
    pass_on(more_of(*first).known);
    each_cell(first, a, [&](Cell& cell) {
        if (cell.in_flight != -1) check_flight(cell, a);
        check_written(cell, a);
        auto& [second, updates, written, known] = more_of(cell);
        if (updates.empty()) written = cell.writer;
        if (!ordered(written, a.clock)) conflict("an atomic update and an earlier write of shared memory, with no barrier between them", written, a);
        check_readers(cell, a);
        cell.writer = a.now;
        const auto mine = std::find_if(updates.begin(), updates.end(), [&](const Touch& t) { return t.thread == a.now.thread; });
        mine == updates.end() ? updates.push_back(a.now) : void(*mine = a.now);
    });
}

// An access of the current thread itself.
Access own(const void* address, int bytes, int line, const void* code) {
    return {address, bytes, line, code, current->clock, touch(line, code), false};
}

Range* range_of(const unsigned char* address, int bytes) {
    const auto inside = [&](const Range& r) { return (uint64_t)address >= r.pointer && (uint64_t)address + bytes <= r.pointer + r.bytes; };
    if (last_range < launch.range_count && inside(launch.ranges[last_range])) return &launch.ranges[last_range];
    for (int i = 0; i < launch.range_count; ++i)
        if (inside(launch.ranges[i])) return &launch.ranges[last_range = i];
    return nullptr;
}

// An access must not touch what lies between the elements of a strided tensor.
__attribute__((noinline, cold)) void check_elements(const Range& range, const unsigned char* address, int bytes, bool write, int line, const void* code) {
    const uint64_t begin = (uint64_t)address - range.pointer, last = (begin + bytes - 1) / range.element_bytes;
    for (uint64_t i = begin / range.element_bytes; i <= last; ++i)
        if (!range.elements[i])
            report(Kind::OUT_OF_BOUNDS, write ? "a write between the elements of a strided tensor" : "a read between the elements of a strided tensor",
                   line, code, 0, nullptr, -1, (const unsigned char*)range.pointer + std::max(begin, i * range.element_bytes), bytes);
}

uint64_t first_thread;              // of the block that runs, counted from 1 through all blocks of the launch

uint64_t global_thread() { return first_thread + current->index; }

constexpr int THREAD_BITS = 48;
constexpr uint64_t ATOMIC = (1ull << THREAD_BITS) - 1;  // stands for the thread, where atomic updates have written

void check_has_waited(const void* address, int bytes, int line, const void* code) {
    if (!current->has_waited)
        report(Kind::EARLY, "global memory is touched before the kernels before this one are known to have ended", line, code, 0, nullptr, -1, address, bytes);
}

void global_read(Range& range, const unsigned char* address, int bytes, int line, const void* code) {
    if (range.elements) check_elements(range, address, bytes, false, line, code);
    range.read += bytes;
    if (!range.writable) return;
    const auto& writers = launch.writers[&range - launch.ranges];
    for (uint64_t i = ((uint64_t)address - range.pointer) / GRANULE; i <= ((uint64_t)address + bytes - 1 - range.pointer) / GRANULE; ++i) {
        if (!writers[i]) report(Kind::UNINITIALIZED_GLOBAL, "global memory is read that no kernel has written", line, code, 0, nullptr, -1, address, bytes);
        const uint64_t thread = writers[i] & ((1ull << THREAD_BITS) - 1);
        const bool of_this_block = thread - first_thread < thread_count;
        if (writers[i] >> THREAD_BITS == launch.sequence && !of_this_block)
            report(Kind::RACE, "a read of global memory that another block of this launch writes", line, code, 0, nullptr, -1, address, bytes);
    }
}

void global_write(Range& range, unsigned char* address, int bytes, int line, const void* code) {
    if (range.elements) check_elements(range, address, bytes, true, line, code);
    if (!range.writable) report(Kind::READ_ONLY, "a write to a tensor that is only read", line, code, 0, nullptr, -1, address, bytes);
    range.written += bytes;
    auto& writers = launch.writers[&range - launch.ranges];
    const uint64_t me = launch.sequence << THREAD_BITS | global_thread();
    for (uint64_t i = ((uint64_t)address - range.pointer) / GRANULE; i <= ((uint64_t)address + bytes - 1 - range.pointer) / GRANULE; ++i) {
        const bool single_byte = bytes < GRANULE;      // bytes of one granule may have two writers
        if (!single_byte && writers[i] >> THREAD_BITS == launch.sequence && writers[i] != me)
            report(Kind::RACE, "two threads of this launch write the same global memory", line, code, 0, nullptr, -1, address, bytes);
        writers[i] = me;
    }
}

void access(unsigned char* address, int bytes, bool write, int line, const void* code, bool aligned = true) {
    if (!launch.checked || combining) return;
    if (address >= current->stack_low && address < current->stack_high) return;
    if (++current->accesses > launch.budget) out_of_budget(line, code);
    const bool power_of_two = !(bytes & (bytes - 1));     // which most are: a division takes long
    if (aligned && (power_of_two ? (uint64_t)address & (bytes - 1) : (uint64_t)address % bytes)) report(Kind::MISALIGNED, "an address that is not a multiple of the access's size", line, code, 0, nullptr, -1, address, bytes);
    if (Cell* cells = cells_of(address, bytes)) {
        const Access a = own(address, bytes, line, code);
        write ? shared_write(cells, a) : shared_read(cells, a);
    } else if (Range* range = range_of(address, bytes)) {
        check_has_waited(address, bytes, line, code);
        write ? global_write(*range, address, bytes, line, code) : global_read(*range, address, bytes, line, code);
    } else {
        if (in_guard(address)) report(Kind::STACK, STACK_IS_FULL, line, code);  // Windows has made room for the report
        const bool of_library = library_of(address);
        if (!write && of_library) return;              // a constant of the library itself
        if (write && of_library) report(Kind::OUT_OF_BOUNDS, "a write to a variable in global memory (__device__), which the emulated device does not have", line, code);
        report(Kind::OUT_OF_BOUNDS, write ? "a write outside every tensor and shared buffer" : "a read outside every tensor and shared buffer", line, code, 0, nullptr, -1, address, bytes);
    }
}

// An access of the current thread, if it is one to be traced. Apart from what the checked mode runs through each time.
__attribute__((noinline, cold)) void trace(const char* what, unsigned char* address, int bytes, bool write, const void* code) {
    if (combining || (address >= current->stack_low && address < current->stack_high)) return;
    const Range* range = cells_of(address, bytes) ? nullptr : range_of(address, bytes);
    if (range || cells_of(address, bytes)) trace_access(what, write, address, bytes, range, code);
}

}  // namespace

void wait_for_kernels_before() { current->has_waited = true; }

// Static arrays come after dynamic ones: all addresses fit the 18 bits of a wgmma's operand.
unsigned static_window() { return SHARED_WINDOW + unsigned((dynamic_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT); }

void reserve_shared(size_t bytes) {
    storage.resize(bytes + 2 * ALIGNMENT);
    dynamic_low = (unsigned char*)(((uint64_t)storage.data() + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    dynamic_bytes = bytes;
    const Bytes found = static_shared();
    static_low = found.low, static_high = found.high;
}

void begin_block_memory(size_t bytes, dim3 block, dim3 grid) {
    first_thread = 1 + thread_count * (block.x + uint64_t(grid.x) * (block.y + uint64_t(grid.y) * block.z));
    memset(dynamic_low, GARBAGE, bytes);
    memset(static_low, GARBAGE, static_high - static_low);
    if (!launch.checked) return;
    more.clear();
    overflows.resize(1);                            // 0: none
    knowing = nullptr;
    dynamic_cells.assign(bytes / GRANULE + 1, Cell());
    static_cells.assign((static_high - static_low) / GRANULE + 1, Cell());
}

unsigned char* dynamic_shared() { return dynamic_low; }

unsigned shared_address(const void* pointer) {
    const auto* p = (const unsigned char*)pointer;
    if (p >= dynamic_low && p <= dynamic_low + dynamic_bytes) return unsigned(p - dynamic_low) + SHARED_WINDOW;
    if (p >= static_low && p <= static_high) return unsigned(p - static_low) + static_window();
    report(Kind::OUT_OF_BOUNDS, "an address that is not in shared memory is taken for one", 0, __builtin_return_address(0), 0, nullptr, -1, pointer);
}

void* shared_pointer(unsigned address) {
    return address >= static_window() ? static_low + (address - static_window()) : dynamic_low + (address - SHARED_WINDOW);
}

void check_access(const void* address, int bytes, bool write, int line, int lane) {
    Fiber* const last = current;
    current = &fibers[last->warp * 32 + lane];
    combining = false;
    access((unsigned char*)address, bytes, write, line, collective_code);
    if (launch.traced) trace(last->what, (unsigned char*)address, bytes, write, collective_code);
    combining = true;
    current = last;
}

namespace {

Cell* background_cells(unsigned address, int bytes, int line) {
    const void* at = shared_pointer(address);
    Cell* cells = cells_of((const unsigned char*)at, bytes);
    if (!cells) report(Kind::OUT_OF_BOUNDS, "TMA or wgmma reach outside shared memory", line, nullptr, 0, nullptr, -1, at, bytes);
    return cells;
}

}  // namespace

void background_read(unsigned address, int bytes, int line, const unsigned* clock, const Touch& reader) {
    if (launch.checked) shared_read(background_cells(address, bytes, line), {shared_pointer(address), bytes, line, nullptr, clock, reader, true});
}

void background_write(unsigned address, int bytes, int line, const unsigned* clock, const Touch& writer) {
    if (launch.checked) shared_write(background_cells(address, bytes, line), {shared_pointer(address), bytes, line, nullptr, clock, writer, true});
}

const Range* background_global(const void* address, int bytes, bool write, int line) {
    if (!launch.checked) return nullptr;
    Range* range = range_of((const unsigned char*)address, bytes);
    if (!range) report(Kind::OUT_OF_BOUNDS, "a TMA copy reaches outside every tensor", line, nullptr, 0, nullptr, -1, address, bytes);
    check_has_waited(address, bytes, line, nullptr);
    write ? global_write(*range, (unsigned char*)address, bytes, line, nullptr) : global_read(*range, (const unsigned char*)address, bytes, line, nullptr);
    return range;
}

void keep_for_mbarrier(unsigned address, int line) {
    if (!launch.checked) return;
    Cell* cell = background_cells(address, 8, line);
    const Access a = own(shared_pointer(address), 8, line, nullptr);
    each_cell(cell, a, [&](Cell& one) { check_overwrite(one, a); });
    for (int i = 0; i < 8; i += GRANULE, ++cell) *cell = Cell(), cell->in_flight = MBARRIER;
}

// What the checks of an atomic update find, and what they remember of it.
static void check_atomic(void* address, int bytes, int line, const void* code, bool counts) {
    spend(ATOMIC_COST, line, code);
    if (!launch.checked) return;
    Cell* const cells = cells_of((const unsigned char*)address, bytes);
    Range* const range = cells ? nullptr : range_of((const unsigned char*)address, bytes);
    if (!cells && !range) report(Kind::OUT_OF_BOUNDS, "an atomic update outside every tensor and shared buffer", line, nullptr, 0, nullptr, -1, address, bytes);
    if ((uint64_t)address % bytes) report(Kind::MISALIGNED, "an atomic update of an address that is not a multiple of its size", line, nullptr, 0, nullptr, -1, address, bytes);
    if (launch.traced)
        for (bool write : {false, true}) trace_access("atomic", write, address, bytes, range, code);
    if (cells) return shared_update(cells, own(address, bytes, line, code));
    check_has_waited(address, bytes, line, code);
    if (range->elements) check_elements(*range, (const unsigned char*)address, bytes, true, line, code);
    if (!range->writable) report(Kind::READ_ONLY, "an atomic update of a tensor that is only read", line, nullptr, 0, nullptr, -1, address, bytes);
    range->read += bytes, range->written += bytes;
    auto& writers = launch.writers[range - launch.ranges];
    const uint64_t mark = launch.sequence << THREAD_BITS | ATOMIC;
    for (uint64_t i = ((uint64_t)address - range->pointer) / GRANULE, last = i + bytes / GRANULE; i < last; ++i) {
        if (!counts && !writers[i]) report(Kind::UNINITIALIZED_GLOBAL, "an addition to global memory that no kernel has written", line, code, 0, nullptr, -1, address, bytes);
        if (writers[i] >> THREAD_BITS == launch.sequence && writers[i] != mark)
            report(Kind::RACE, "an atomic update of global memory that a thread of this launch has written", line, nullptr, 0, nullptr, -1, address, bytes);
        writers[i] = mark;
    }
}

void atomic_update(void* address, int bytes, bool counts, void (*update)(void* value, void* with), void* with, int line) {
    check_atomic(address, bytes, line, __builtin_return_address(0), counts);
    uint64_t value = 0;
    memcpy(&value, address, bytes);
    update(&value, with);
    const bool waits = memcmp(address, &value, bytes) == 0;  // perhaps, in a loop, for another thread
    memcpy(address, &value, bytes);
    if (waits) switch_to_scheduler();
}

void global_add(float* address, const float* by, int count, int line) {
    const int bytes = count * sizeof(float);
    if (cells_of((const unsigned char*)address, bytes)) report(Kind::OPERAND, "an addition to global memory whose address is in shared memory", line, nullptr, 0, nullptr, -1, address, bytes);
    check_atomic(address, bytes, line, __builtin_return_address(0), false);
    for (int i = 0; i < count; ++i) address[i] += by[i];
}

// The data arrives when its group is waited for, which is the latest that the hardware may deliver it.
void async_copy(unsigned to, const void* from, int bytes, int source_bytes, int line) {
    auto* target = (unsigned char*)shared_pointer(to);
    const void* code = __builtin_return_address(0);
    if (launch.checked) {
        if ((uint64_t)target % bytes || (source_bytes && (uint64_t)from % bytes))
            report(Kind::MISALIGNED, "an asynchronous copy whose address is not a multiple of its size", line, nullptr, 0, nullptr, -1,
                   (uint64_t)target % bytes ? target : from, bytes);
        if (source_bytes) access((unsigned char*)from, source_bytes, false, line, code);
        if (source_bytes && launch.traced) trace("cp.async", (unsigned char*)from, source_bytes, false, code);
        const Access a = own(target, bytes, line, nullptr);
        Cell* cell = cells_of(target, bytes);
        if (!cell) report(Kind::OUT_OF_BOUNDS, "an asynchronous copy to outside shared memory", line, nullptr, 0, nullptr, -1, target, bytes);
        launch.shared_written += bytes;
        each_cell(cell, a, [&](Cell& one) {
            check_overwrite(one, a);
            one.in_flight = current->index;
        });
        if (launch.traced) trace_access("cp.async", true, target, bytes, nullptr, code);
    }
    current->uncommitted.push_back({target, from, bytes, source_bytes, code, line});
}

void async_commit() {
    current->groups.push_back(std::move(current->uncommitted));
    current->uncommitted.clear();
}

void async_wait(int pending) {
    auto& groups = current->groups;
    while (int(groups.size()) > pending) {
        for (const Copy& copy : groups.front()) {
            memcpy(copy.to, copy.from, copy.source_bytes);
            memset(copy.to + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
            if (!launch.checked) continue;
            each_cell(cells_of(copy.to, copy.bytes), own(copy.to, copy.bytes, 0, copy.code), [&](Cell& cell) {
                cell.in_flight = -1;
                cell.initialized = true;
                cell.writer = touch(0, copy.code);
                if (cell.has_more) more[&cell].updates.clear();
            });
        }
        groups.erase(groups.begin());
    }
}

// What is still on its way when a block ends would land in the shared memory of the next.
bool end_block_copies() {
    for (Fiber& f : fibers) {
        f.groups.push_back(std::move(f.uncommitted));
        for (const auto& group : f.groups) {
            if (group.empty()) continue;
            current = &f;
            record(Kind::IN_FLIGHT, "the block ends, and nobody has waited for an asynchronous copy", group.front().line);
            return false;
        }
    }
    return true;
}

void count_instruction(int which) { ++launch.instruction_counts[which]; }

}  // namespace emulator

// For Python: where in shared memory an address lies. 0: nowhere; 1: in dynamic, 2: in static memory, at `offset`.
EXPORTED int emulator_shared_offset(uint64_t address, uint64_t* offset) {
    using namespace emulator;
    const auto* p = (const unsigned char*)address;
    const bool is_dynamic = p >= dynamic_low && p < dynamic_low + dynamic_bytes;
    const bool is_static = p >= static_low && p < static_high;
    *offset = is_dynamic ? p - dynamic_low : is_static ? p - static_low : 0;
    return is_dynamic ? 1 : is_static ? 2 : 0;
}

// What -fsanitize=thread calls. The names are the compiler's.
#define CHECK(bytes, write, aligned)                                                                              \
    {                                                                                                             \
        using namespace emulator;                                                                                 \
        auto* const at = (unsigned char*)address;                                                                 \
        if (size_t(at - running_stack) < STACK_BYTES) return; /* a thread's own: the most frequent by far */        \
        if (launch.traced) trace(write ? "store" : "load", at, bytes, write, __builtin_return_address(0));         \
        access(at, bytes, write, 0, __builtin_return_address(0), aligned); /* last: a jump */                     \
    }
#define ACCESS(name, bytes, write, aligned) extern "C" void name(void* address) CHECK(bytes, write, aligned)
#define ALIGNED(bytes) ACCESS(__tsan_read##bytes, bytes, false, true) ACCESS(__tsan_write##bytes, bytes, true, true)
#define ANYWHERE(bytes) ACCESS(__tsan_unaligned_read##bytes, bytes, false, false) ACCESS(__tsan_unaligned_write##bytes, bytes, true, false)
ALIGNED(1) ALIGNED(2) ALIGNED(4) ALIGNED(8) ALIGNED(16)
ANYWHERE(2) ANYWHERE(4) ANYWHERE(8) ANYWHERE(16)
extern "C" void __tsan_read_range(void* address, size_t bytes) CHECK(int(bytes), false, false)
extern "C" void __tsan_write_range(void* address, size_t bytes) CHECK(int(bytes), true, false)
// clang calls these for assignments of whole structs and arrays.
namespace emulator {
namespace {
void access_range(const void* address, size_t bytes, bool write, const void* code) {
    auto* const at = (unsigned char*)address;
    if (!bytes) return;
    if (launch.traced) trace(write ? "store" : "load", at, int(bytes), write, code);
    access(at, int(bytes), write, 0, code, false);
}
}  // namespace
}  // namespace emulator
extern "C" void* __tsan_memset(void* to, int value, size_t bytes) {
    emulator::access_range(to, bytes, true, __builtin_return_address(0));
    return memset(to, value, bytes);
}
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
    emulator::access_range(from, bytes, false, __builtin_return_address(0));
    emulator::access_range(to, bytes, true, __builtin_return_address(0));
    return memcpy(to, from, bytes);
}
extern "C" void* __tsan_memmove(void* to, const void* from, size_t bytes) {
    emulator::access_range(from, bytes, false, __builtin_return_address(0));
    emulator::access_range(to, bytes, true, __builtin_return_address(0));
    return memmove(to, from, bytes);
}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
extern "C" void __tsan_init() {}

// What -fsanitize=bounds calls for an index outside an array whose size is known: one in registers or in static shared memory.
namespace emulator {
namespace {
struct TypeDescriptor { unsigned short kind, info; char name[1]; };
struct OutOfBounds { const char* file; unsigned line, column; const TypeDescriptor *array, *index; };

[[noreturn]] void index_outside(const OutOfBounds& what, size_t index, const void* code) {
    char text[200];
    snprintf(text, sizeof(text), "the index %ld of an array of the type %s", long(int(index)), what.array->name);
    report(Kind::OUT_OF_BOUNDS, text, int(what.line), code);
}
}  // namespace
}  // namespace emulator
extern "C" void __ubsan_handle_out_of_bounds(void* what, size_t index) {
    emulator::index_outside(*(const emulator::OutOfBounds*)what, index, __builtin_return_address(0));
}
extern "C" void __ubsan_handle_out_of_bounds_abort(void* what, size_t index) {
    emulator::index_outside(*(const emulator::OutOfBounds*)what, index, __builtin_return_address(0));
}
