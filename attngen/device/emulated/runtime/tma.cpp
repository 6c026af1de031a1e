// Copies of boxes of a tensor between global and shared memory (PTX ISA, "cp.async.bulk.tensor"). All checks are made when a copy is
// issued; its data moves later: a load's when the scheduler wants it to, a store's when it is waited for.
#include <algorithm>
#include <cstring>

#include "trace.hpp"

namespace emulator {

namespace {

// The 128 bytes of a TensorMap on this device; attngen/device/emulated/tensor_map.py writes them.
struct Map {
    char magic[8];
    uint64_t address;
    uint64_t sizes[5];              // in elements; the innermost dimension first
    uint64_t strides[4];            // in bytes, of all dimensions but the innermost
    uint16_t box[5];                // in elements
    uint8_t rank, element_bytes, swizzled;
};
constexpr char MAGIC[8] = {'a', 't', 't', 'n', 'm', 'a', 'p', '1'};

constexpr int CHUNK = 16;           // bytes; rows of a box are multiples of it

struct Box {
    Map map;
    Coordinates at;
    unsigned shared;
    int issuer, line;

    int row_bytes() const { return map.box[0] * map.element_bytes; }
    int rows() const {
        int n = 1;
        for (int d = 1; d < map.rank; ++d) n *= map.box[d];
        return n;
    }
    int bytes() const { return rows() * row_bytes(); }
};

struct Load { Box box; Ticket ticket; };
struct Store { Box box; std::vector<unsigned char> data; };
struct Stores {                     // of one thread
    int thread, agent = -1;
    unsigned committed = 0;         // groups; they are numbered from 0
    std::vector<Store> open;
    struct Group { unsigned number; bool read; std::vector<Store> stores; };
    std::vector<Group> groups;
};

std::vector<Load> loads;
std::vector<Stores> stores;

// The 128-byte swizzle: sixteen-byte chunks of a row of 128 bytes are permuted by the row's number modulo 8.
unsigned place(const Box& box, int offset) {
    const unsigned linear = box.shared + offset;
    return box.map.swizzled ? linear ^ (linear >> 3 & 0x70) : linear;
}

// What of row `row` of the box lies inside the tensor: elements [first, last), of which `address` is the first's.
struct Run { int first, last; unsigned char* address; };
Run run_of(const Box& box, int row) {
    const Map& m = box.map;
    const long long left = box.at.at[0], size = (long long)m.sizes[0];
    const int first = int(std::clamp<long long>(-left, 0, m.box[0])), last = int(std::clamp<long long>(size - left, first, m.box[0]));
    uint64_t address = m.address + (left + first) * m.element_bytes;
    for (int d = 1; d < m.rank; ++d) {
        const long long index = box.at.at[d] + row % m.box[d];
        row /= m.box[d];
        if (index < 0 || index >= (long long)m.sizes[d]) return {0, 0, nullptr};
        address += uint64_t(index) * m.strides[d - 1];
    }
    return {first, last, (unsigned char*)address};
}

// Calls `move(global, shared, bytes)` for every element inside the tensor.
template <typename Move> void each_element(const Box& box, Move move) {
    const int bytes = box.map.element_bytes;
    for (int row = 0; row < box.rows(); ++row) {
        const Run run = run_of(box, row);
        for (int i = run.first; i < run.last; ++i)
            move(run.address + (i - run.first) * bytes, (unsigned char*)shared_pointer(place(box, row * box.row_bytes() + i * bytes)), bytes);
    }
}

Box checked_box(int rank, unsigned shared, const void* map, const Coordinates& at, int line) {
    Box box{{}, at, shared, current->index, line};
    if ((uint64_t)map % 64) report(Kind::MISALIGNED, "a tensor map whose address is not a multiple of 64", line, nullptr, 0, nullptr, -1, map, 128);
    memcpy(&box.map, map, sizeof(Map));
    if (memcmp(box.map.magic, MAGIC, sizeof(MAGIC))) report(Kind::OPERAND, "TMA is given something that is not a tensor map", line, nullptr, 0, nullptr, -1, map, 128);
    if (box.map.rank != rank) report(Kind::OPERAND, "a TMA copy of as many coordinates as its tensor map does not have", line);
    if (shared % (box.map.swizzled ? 1024 : 128))
        report(Kind::MISALIGNED, "a TMA copy whose address in shared memory is not a multiple of 128, or of 1024 with the 128-byte swizzle", line, nullptr, 0, nullptr, -1, shared_pointer(shared), box.bytes());
    return box;
}

void check_global(const Box& box, bool write) {
    const Range* range = nullptr;
    const void* first = nullptr;
    int bytes = 0;
    for (int row = 0; row < box.rows(); ++row) {
        const Run run = run_of(box, row);
        if (run.first >= run.last) continue;
        const int of_row = (run.last - run.first) * box.map.element_bytes;
        range = background_global(run.address, of_row, write, box.line);
        if (!first) first = run.address;
        bytes += of_row;
    }
    if (launch.traced && bytes) trace_bulk(write ? "tma store" : "tma load", write, first, bytes, range);
}

Stores& stores_of_current() {
    for (Stores& s : stores)
        if (s.thread == current->index) return s;
    stores.push_back({current->index});
    return stores.back();
}

void read_shared(Stores::Group& group) {
    if (group.read) return;
    group.read = true;
    for (Store& s : group.stores) each_element(s.box, [&](unsigned char*, unsigned char* shared, int bytes) { s.data.insert(s.data.end(), shared, shared + bytes); });
}

void write_global(Stores::Group& group) {
    for (Store& s : group.stores) {
        const unsigned char* from = s.data.data();
        each_element(s.box, [&](unsigned char* global, unsigned char*, int bytes) {
            memcpy(global, from, bytes);
            from += bytes;
        });
    }
}

bool land(size_t which) {
    const Load load = loads[which];
    loads.erase(loads.begin() + which);
    const Box& box = load.box;
    for (int i = 0; i < box.bytes(); i += CHUNK) memset(shared_pointer(place(box, i)), 0, CHUNK);
    each_element(box, [](unsigned char* global, unsigned char* shared, int bytes) { memcpy(shared, global, bytes); });
    current = &fibers[box.issuer];
    return bring_bytes(load.ticket, box.bytes(), box.line);
}

void load(const Box& box, unsigned barrier) {
    const Ticket t = ticket(barrier, box.line);
    check_global(box, false);
    background_write(box.shared, box.bytes(), box.line, current->clock, t.writer);
    if (launch.traced) trace_bulk("tma load", true, shared_pointer(box.shared), box.bytes(), nullptr);
    loads.push_back({box, t});
}

}  // namespace

void begin_block_tma() {
    loads.clear();
    stores.clear();
}

void tma_load(int rank, unsigned to, const void* map, Coordinates coordinates, unsigned barrier, int line) {
    load(checked_box(rank, to, map, coordinates, line), barrier);
}

// A copy without a tensor map is that of a box of one row, in elements of 16 bytes.
void bulk_load(unsigned to, const void* from, unsigned bytes, unsigned barrier, int line) {
    if (to % CHUNK || (uint64_t)from % CHUNK || bytes % CHUNK || bytes == 0)
        report(Kind::MISALIGNED, "a bulk copy whose addresses or size are not multiples of 16", line, nullptr, 0, nullptr, -1, from, bytes);
    Box box{{}, {}, to, current->index, line};
    box.map.address = (uint64_t)from;
    box.map.sizes[0] = box.map.box[0] = uint16_t(bytes / CHUNK);
    box.map.rank = 1, box.map.element_bytes = CHUNK;
    load(box, barrier);
}

// Those under way arrive in any order; the last one first, where the order is not permuted.
bool land_one_load(uint64_t random) {
    if (loads.empty()) return false;
    land(random ? random % loads.size() : loads.size() - 1);
    return true;
}

void tma_store(int rank, const void* map, Coordinates coordinates, unsigned from, int line) {
    const Box box = checked_box(rank, from, map, coordinates, line);
    for (int d = 0; d < rank; ++d)
        if (box.at.at[d] < 0) report(Kind::OUT_OF_BOUNDS, "a TMA store of a box that begins before its tensor: a GPU stops there with an illegal instruction", line);
    Stores& mine = stores_of_current();
    if (launch.checked && mine.agent < 0) mine.agent = new_agent(Background::TMA_STORE, current->index);
    const Touch reader{mine.agent, mine.committed + 1, nullptr, line};
    int bytes = 0;
    for (int row = 0; row < box.rows(); ++row) {
        const Run run = run_of(box, row);
        const int low = run.first * box.map.element_bytes / CHUNK * CHUNK, high = run.last * box.map.element_bytes;
        for (int i = low; i < high; i += CHUNK) background_read(place(box, row * box.row_bytes() + i), CHUNK, line, current->clock, reader);
        bytes += high > low ? (high - low + CHUNK - 1) / CHUNK * CHUNK : 0;
    }
    if (launch.traced && bytes) trace_bulk("tma store", false, shared_pointer(from), bytes, nullptr);
    check_global(box, true);
    mine.open.push_back({box, {}});
}

void tma_store_commit() {
    Stores& mine = stores_of_current();
    mine.groups.push_back({mine.committed++, false, std::move(mine.open)});
    mine.open.clear();
}

void tma_store_wait(int pending, bool only_read) {
    Stores& mine = stores_of_current();
    const unsigned done = mine.committed > unsigned(pending) ? mine.committed - pending : 0;
    for (Stores::Group& g : mine.groups)
        if (g.number < done) read_shared(g);
    if (launch.checked && mine.agent >= 0) current->clock[mine.agent] = std::max(current->clock[mine.agent], done);
    while (!only_read && !mine.groups.empty() && mine.groups.front().number < done) {
        write_global(mine.groups.front());
        mine.groups.erase(mine.groups.begin());
    }
}

// Shared memory is gone when the block ends: a store must have read it.
void end_thread_tma() {
    if (stores.empty()) return;
    Stores& mine = stores_of_current();
    if (!mine.open.empty()) report(Kind::IN_FLIGHT, "a thread ends, and a TMA store of it is in no group", mine.open[0].box.line);
    for (const Stores::Group& g : mine.groups)
        if (!g.read && !g.stores.empty()) report(Kind::IN_FLIGHT, "a thread ends while a TMA store of it still reads shared memory", g.stores[0].box.line);
}

bool end_block_tma() {
    for (Stores& s : stores)
        for (Stores::Group& g : s.groups) write_global(g);
    if (loads.empty()) return true;
    const Load first = loads[0];
    while (!loads.empty())
        if (!land(loads.size() - 1)) return false;
    current = &fibers[first.box.issuer];
    record(Kind::IN_FLIGHT, "the block ends, and nobody has waited for a TMA load", first.box.line);
    return false;
}

}  // namespace emulator
