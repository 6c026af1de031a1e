// Accesses are grouped into those of a warp: between two meetings of a warp (a block barrier, or anything that all its lanes do together)
// the n-th execution of a statement by each lane is one execution by the warp. Lanes that have none take no part: they are idle.
#include "trace.hpp"

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace emulator {

namespace {

constexpr int LANES = 32, BANKS = 32, BANK_BYTES = 4, SECTOR = 32, MAX_WIDTH = 16;
constexpr int NO_BUFFER = -1;

// One execution of a statement by a warp.
struct Request { uint64_t address[LANES]; unsigned mask; int bytes; const Range* range; };

// The executions of a statement by one warp since its last meeting.
struct Pending { std::vector<Request> requests; unsigned count[LANES] = {}; };

// A statement that is known by its address and its calls; its sites differ by buffer.
struct Statement { int first_site; std::vector<int> sites; };
struct Warp { std::vector<Pending> pending; std::vector<int> active; };

std::vector<Site> sites;
std::vector<Statement> statements;
std::unordered_map<uint64_t, int> known_statements;
uint64_t last_key;
int last_statement = -1;
std::vector<Warp> traced_warps;
std::vector<Buffer> buffers;

std::vector<Step> steps;
std::vector<int> step_counts;       // of each thread
int watched_block, step_limit;      // of a thread in a launch
std::vector<unsigned char> watched_threads;
bool accessed_together;             // the lanes of a warp, as ldmatrix does: that is traced, and not that they have met
int open_write = -1;                // the step whose value is still to be written
const void* open_address;

int linear_block() {
    const Position& p = *running;
    return int(p.block.x + p.grid.x * (p.block.y + p.grid.y * p.block.z));
}

uint64_t mixed(uint64_t a, uint64_t b) {
    a ^= b + 0x9e3779b97f4a7c15ull + (a << 6) + (a >> 2);
    return a * 0xff51afd7ed558ccdull;
}

int new_site(const char* what, bool write, int buffer, const uint64_t* calls) {
    Site site = {};
    memcpy(site.calls, calls, sizeof(site.calls));
    site.launch = int(launch.sequence) - 1, site.statement = int(statements.size());
    site.what = what, site.write = write, site.buffer = buffer;
    sites.push_back(site);
    return int(sites.size()) - 1;
}

int statement_of(const char* what, bool write, uint64_t key) {
    key = mixed(mixed(key, (uint64_t)what), write);
    if (key == last_key && last_statement >= 0) return last_statement;
    last_key = key;
    const auto found = known_statements.find(key);
    if (found != known_statements.end()) return last_statement = found->second;
    uint64_t calls[CALLS];
    walk_calls(calls, CALLS);
    statements.push_back({new_site(what, write, NO_BUFFER, calls), {}});
    return last_statement = known_statements[key] = int(statements.size()) - 1;
}

uint64_t here(const void* code) {
    const auto& calls = (code == collective_code ? collective_last : current)->call_hashes;
    return mixed(calls.empty() ? 0 : calls.back(), (uint64_t)code);
}

// Its site that accesses no memory, or `buffer`.
int site_of(int statement, int buffer) {
    Statement& s = statements[statement];
    if (sites[s.first_site].buffer == buffer) return s.first_site;
    for (int site : s.sites)
        if (sites[site].buffer == buffer) return site;
    const Site like = sites[s.first_site];
    s.sites.push_back(new_site(like.what, like.write, buffer, like.calls));
    sites.back().statement = statement;
    return s.sites.back();
}

uint64_t place_of(const Buffer& b) { return b.is_static ? static_window() + b.offset : SHARED_WINDOW + b.offset; }

// The number of the buffer that holds `address`, and where in it that is.
int buffer_of(uint64_t address, const Range* range, uint64_t& offset) {
    const uint64_t at = range ? address : shared_address((const void*)address);
    for (size_t i = 0; i < buffers.size(); ++i) {
        const Buffer& b = buffers[i];
        const bool global = b.range >= 0;
        if (global != (range != nullptr) || (global && &launch.ranges[b.range] != range)) continue;
        const uint64_t low = global ? range->pointer : place_of(b);
        if (at < low || at >= low + b.bytes) continue;
        offset = at - low;
        return int(i);
    }
    offset = 0;
    return NO_BUFFER;
}

// --- a warp's executions

// The wavefronts of one phase: the most different words of one bank.
int wavefronts_of(const std::vector<uint64_t>& words) {
    int most = 0, of_bank[BANKS] = {};
    for (size_t i = 0; i < words.size(); ++i)
        if (std::find(words.begin(), words.begin() + i, words[i]) == words.begin() + i) most = std::max(most, ++of_bank[words[i] % BANKS]);
    return most;
}

// Shared memory serves 128 bytes at once: a warp's accesses of 8 bytes a lane in two phases, of 16 in four, of 8 lanes each. More than
// that is several instructions.
void count_banks(Site& site, const Request& r) {
    static std::vector<uint64_t> words;
    for (int from = 0; from < r.bytes; from += MAX_WIDTH) {
        const int bytes = std::min(r.bytes - from, MAX_WIDTH);
        const int together = bytes <= 4 ? LANES : bytes <= 8 ? LANES / 2 : LANES / 4;
        for (int first = 0; first < LANES; first += together) {
            words.clear();
            for (int lane = first; lane < first + together; ++lane)
                if (r.mask >> lane & 1) {
                    const uint64_t at = shared_address((const void*)(r.address[lane] + from));
                    for (uint64_t word = at / BANK_BYTES; word <= (at + bytes - 1) / BANK_BYTES; ++word) words.push_back(word);
                }
            if (words.empty()) continue;
            const int wavefronts = wavefronts_of(words);
            ++site.phases;
            site.wavefronts += wavefronts;
            site.degree = std::max(site.degree, wavefronts);
        }
    }
}

void count_sectors(Site& site, const Request& r) {
    static std::vector<uint64_t> touched;
    touched.clear();
    for (int lane = 0; lane < LANES; ++lane)
        if (r.mask >> lane & 1)
            for (uint64_t s = r.address[lane] / SECTOR; s <= (r.address[lane] + r.bytes - 1) / SECTOR; ++s) touched.push_back(s);
    std::sort(touched.begin(), touched.end());
    site.sectors += std::unique(touched.begin(), touched.end()) - touched.begin();
}

void count(int statement, const Request& r) {
    uint64_t offset;
    const int first = __builtin_ctz(r.mask), lanes = __builtin_popcount(r.mask);
    Site& site = sites[site_of(statement, buffer_of(r.address[first], r.range, offset))];
    ++site.executions;
    site.lanes += lanes;
    site.bytes += uint64_t(lanes) * r.bytes;
    site.width = r.bytes;
    r.range ? count_sectors(site, r) : count_banks(site, r);
}

void close(Warp& warp) {
    for (int statement : warp.active) {
        Pending& p = warp.pending[statement];
        for (const Request& r : p.requests) count(statement, r);
        p.requests.clear();
        memset(p.count, 0, sizeof(p.count));
    }
    warp.active.clear();
}

void pass_meeting(int first, int lanes, unsigned mask, bool of_block) {
    for (int i = 0; i < lanes; ++i) {
        if (lanes <= LANES && !(mask >> i & 1)) continue;
        Fiber& f = fibers[first + i];
        ++f.epoch, f.order = 0;
        f.phase += of_block;
    }
}

// --- steps

bool is_watched(const Fiber& f) {
    return step_limit && size_t(f.index) < watched_threads.size() && watched_threads[f.index] && linear_block() == watched_block &&
           step_counts[f.index] < step_limit;
}

void finish_write() {
    if (open_write >= 0) memcpy(steps[open_write].value, open_address, steps[open_write].bytes);
    open_write = -1;
}

void add_step(Fiber& f, int site, const void* address, int bytes, uint64_t offset, bool has_value) {
    ++step_counts[f.index];
    Step s = {site, linear_block(), f.index, f.phase, f.epoch, f.order++, bytes, has_value, offset, {}};
    const bool write = sites[site].write;
    if (has_value && !write) memcpy(s.value, address, bytes);
    steps.push_back(s);
    if (has_value && write) open_write = int(steps.size()) - 1, open_address = address;
}

}  // namespace

void begin_block_trace() {
    traced_warps.resize((fibers.size() + LANES - 1) / LANES);
    if (step_counts.size() < fibers.size()) step_counts.resize(fibers.size());
    for (Fiber& f : fibers) {
        f.call_hashes.clear();
        f.phase = f.epoch = f.order = 0;
    }
}

void end_block_trace() {
    finish_write();
    for (Warp& w : traced_warps) close(w);
}

void trace_access(const char* what, bool write, const void* address, int bytes, const Range* range, const void* code) {
    finish_write();
    accessed_together |= code == collective_code;
    const int statement = statement_of(what, write, here(code));
    Warp& warp = traced_warps[current->warp];
    if (warp.pending.size() <= size_t(statement)) warp.pending.resize(statement + 1);
    Pending& p = warp.pending[statement];
    if (p.requests.empty()) warp.active.push_back(statement);
    const unsigned n = p.count[current->lane]++;
    if (n == p.requests.size()) p.requests.push_back({{}, 0, bytes, range});
    Request& r = p.requests[n];
    r.address[current->lane] = (uint64_t)address;
    r.mask |= 1u << current->lane;
    if (!is_watched(*current)) return;
    uint64_t offset;
    const int site = site_of(statement, buffer_of((uint64_t)address, range, offset));
    // what an asynchronous copy or a matrix store writes is not there yet at the next access
    add_step(*current, site, address, bytes, offset, bytes <= 16 && (!write || !strcmp(what, "store")));
}

void trace_bulk(const char* what, bool write, const void* address, int bytes, const Range* range) {
    finish_write();
    uint64_t calls[CALLS], key = 0, offset;
    walk_calls(calls, CALLS);
    for (uint64_t call : calls) key = mixed(key, call);
    const int id = site_of(statement_of(what, write, key), buffer_of((uint64_t)address, range, offset));
    Site& site = sites[id];
    ++site.executions, ++site.lanes;
    site.bytes += bytes;
    site.width = bytes;
    if (is_watched(*current)) add_step(*current, id, address, bytes, offset, false);
}

void trace_meeting(const char* what, unsigned mask, int line, const void* code) {
    finish_write();
    const int first = current->warp * LANES, left = std::min(LANES, int(fibers.size()) - first);
    if (!accessed_together) {
        const int id = statements[statement_of(what, false, mixed(here(code), line))].first_site;
        ++sites[id].executions;
        sites[id].lanes += __builtin_popcount(mask);
        for (int i = 0; i < left; ++i)
            if ((mask >> i & 1) && is_watched(fibers[first + i])) add_step(fibers[first + i], id, nullptr, 0, 0, false);
    }
    accessed_together = false;
    close(traced_warps[current->warp]);
    pass_meeting(first, left, mask, false);
}

void trace_event(const char* what, bool counts, const void* code) {
    finish_write();
    const int id = statements[statement_of(what, false, here(code))].first_site;
    sites[id].executions += counts, ++sites[id].lanes;
    if (is_watched(*current)) add_step(*current, id, nullptr, 0, 0, false);
}

void trace_mbarrier(const char* what, unsigned address, unsigned phase, unsigned number, const void* code) {
    finish_write();
    const int id = statements[statement_of(what, false, here(code))].first_site;
    ++sites[id].executions, ++sites[id].lanes;
    if (!is_watched(*current)) return;
    uint64_t offset;
    const int buffer = buffer_of((uint64_t)shared_pointer(address), nullptr, offset);
    const unsigned seen[4] = {unsigned(buffer), unsigned(offset), phase, number};
    add_step(*current, id, seen, sizeof(seen), 0, true);
}

void trace_block_meeting() {
    for (Warp& w : traced_warps) close(w);
    pass_meeting(0, int(fibers.size()), ~0u, true);
}

}  // namespace emulator

// For Python: what to trace of the next launch, and what has been found since the first one. `first`: forget what was found before.
EXPORTED void emulator_trace(int first, const emulator::Buffer* table, int count, int block, const unsigned char* threads,
                             int thread_count, int limit) {
    using namespace emulator;
    if (first) {
        sites.clear(), statements.clear(), known_statements.clear(), steps.clear(), traced_warps.clear();
        last_statement = open_write = -1;
        accessed_together = false;
    }
    step_counts.clear();
    buffers.assign(table, table + count);
    watched_block = block, step_limit = limit;
    watched_threads.assign(threads, threads + thread_count);
}

EXPORTED void emulator_traced(const emulator::Site** found_sites, int* site_count, const emulator::Step** found_steps, int* step_count) {
    using namespace emulator;
    *found_sites = sites.data(), *site_count = int(sites.size());
    *found_steps = steps.data(), *step_count = int(steps.size());
}

namespace emulator {

namespace {

// Apart from what the checked mode runs through at each call.
__attribute__((noinline, cold)) void enter(void* from) {
    if (!current) return;
    auto& hashes = current->call_hashes;
    hashes.push_back(mixed(hashes.empty() ? 0 : hashes.back(), (uint64_t)from));
}
__attribute__((noinline, cold)) void leave() {
    if (current && !current->call_hashes.empty()) current->call_hashes.pop_back();
}

}  // namespace

}  // namespace emulator

extern "C" void __tsan_func_entry(void* from) {
    if (emulator::launch.traced) emulator::enter(from);
}
extern "C" void __tsan_func_exit() {
    if (emulator::launch.traced) emulator::leave();
}
