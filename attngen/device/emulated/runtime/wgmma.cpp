// wgmma (PTX ISA, "Asynchronous warpgroup level matrix instructions"): products of 128 threads, in the background. Operands are checked
// when the last thread has issued; they are read and multiplied when a group is first waited for; each thread gets its accumulators
// at its own wait, and until then they hold a pattern that no product leaves there.
#include <algorithm>
#include <cstring>
#include <deque>
#include <list>

#include "trace.hpp"

namespace emulator {

namespace {

constexpr int THREADS = 128, ROWS = 64, MOST_DEPTH = 32;
constexpr unsigned IN_FLIGHT = 0x7fa0dead;          // a signalling NaN

// The registers of one accumulator of one thread, while products are under way. The values are here, not there.
struct Held { float* registers; std::vector<float> values; unsigned last_group; };

struct Product {
    Wgmma shape;
    int line, issued = 0;
    unsigned group;
    Held* accumulators[THREADS] = {};
    unsigned a[THREADS][4];
    Clock known;                    // what all threads that have issued know
};

struct ThreadState {
    size_t issued = 0;              // products
    unsigned committed = 0, received = 0;   // groups
    bool fenced = false;
    std::list<Held> held;
};

struct Warpgroup {
    bool used = false;
    int agent = -1;
    size_t first_product = 0;       // the number of products.front()
    std::deque<Product> products;
    std::vector<size_t> group_ends; // of all groups so far: how many products they and the ones before have
    std::vector<int> committed;     // of each group: how many threads have committed it
    unsigned computed = 0;          // groups
    ThreadState threads[THREADS];
};

std::deque<Warpgroup> warpgroups;
bool somebody_waits;

// An operand in shared memory: rows of 128 bytes, swizzled; descriptors as PTX ISA, "Matrix descriptor format".
struct Operand {
    unsigned start, leading, stride;
    bool transposed;                // rows run along M or N; else along K
    int bytes;                      // of an element

    int depth() const { return 32 / bytes; }    // K
    // The address of 16 bytes of elements from [mn][k] on, along the rows.
    unsigned chunk(int mn, int k) const {
        const unsigned linear = transposed ? start + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2 : start + mn / 8 * stride + mn % 8 * 128 + k * bytes;
        return linear ^ (linear >> 3 & 0x70);
    }
    template <typename F> void each_chunk(int size, F f) const {
        for (int mn = 0; mn < size; mn += transposed ? 8 : 1)
            for (int k = 0; k < depth(); k += transposed ? 1 : 16 / bytes) f(mn, k, chunk(mn, k));
    }
};

Operand operand(unsigned long long descriptor, bool transposed, int bytes, int line) {
    if (descriptor >> 62 != 1) report(Kind::OPERAND, "the emulated device knows wgmma operands with the 128-byte swizzle only", line);
    if (descriptor >> 49 & 7) report(Kind::OPERAND, "a wgmma operand with a base offset: let tiles begin at multiples of 1024", line);
    const auto field = [&](int bit) { return unsigned(descriptor >> bit & 0x3fff) << 4; };
    return {field(0), field(16), field(32), transposed, bytes};
}

Warpgroup& warpgroup() {
    Warpgroup& g = warpgroups[current->index / THREADS];
    if (g.used) return g;
    if (current->index / THREADS * THREADS + THREADS > int(fibers.size())) report(Kind::DIVERGENT_WARPGROUP, "wgmma needs four warps, of numbers from a multiple of four on", 0);
    g.used = true;
    if (launch.checked) g.agent = new_agent(Background::WGMMA, current->index);
    return g;
}

ThreadState& mine(Warpgroup& g) { return g.threads[current->index % THREADS]; }

bool alike(const Wgmma& a, const Wgmma& b) {
    return a.columns == b.columns && a.bytes == b.bytes && a.a_in_registers == b.a_in_registers && a.b == b.b && a.accumulate == b.accumulate &&
           a.a_transposed == b.a_transposed && a.b_transposed == b.b_transposed && (a.a_in_registers || a.a == b.a);
}

void check_untouched(const Held& held, int line) {
    unsigned changed = 0;
    for (size_t i = 0, size = held.values.size(); i < size; ++i) {
        unsigned bits;
        memcpy(&bits, held.registers + i, 4);
        changed |= bits ^ IN_FLIGHT;
    }
    if (changed) report(Kind::ACCUMULATOR, "an accumulator has been written while a wgmma that has not been waited for uses it", line);
}

// Takes the accumulator from the thread, where no product under way has it already.
Held* hold(ThreadState& t, const Wgmma& product, int line) {
    const size_t count = product.columns / 2;
    for (Held& held : t.held) {
        if (held.registers + held.values.size() <= product.d || product.d + count <= held.registers) continue;
        if (held.registers != product.d || held.values.size() != count) report(Kind::ACCUMULATOR, "two wgmma under way have overlapping accumulators of different shapes", line);
        check_untouched(held, line);
        return &held;
    }
    t.held.push_back({product.d, std::vector<float>(product.d, product.d + count), 0});
    for (size_t i = 0; i < count; ++i) memcpy(product.d + i, &IN_FLIGHT, 4);
    return &t.held.back();
}

void check_operands(const Warpgroup& g, const Product& p) {
    const Touch reader{g.agent, p.group + 1, nullptr, p.line};
    const auto check = [&](const Operand& o, int size) {
        if (launch.traced) trace_bulk("wgmma", false, shared_pointer(o.start), size * 32, nullptr);
        o.each_chunk(size, [&](int, int, unsigned address) { background_read(address, 16, p.line, p.known.data(), reader); });
    };
    if (!p.shape.a_in_registers) check(operand(p.shape.a, p.shape.a_transposed, p.shape.bytes, p.line), ROWS);
    check(operand(p.shape.b, p.shape.b_transposed, p.shape.bytes, p.line), p.shape.columns);
}

// to[mn][k], or to[k][mn] for B.
void load_operand(const Product& p, const Operand& o, int size, float* to, int mn_pitch, int k_pitch) {
    o.each_chunk(size, [&](int mn, int k, unsigned address) {
        unsigned char chunk[16];
        memcpy(chunk, shared_pointer(address), 16);
        for (int i = 0; i < 16 / o.bytes; ++i) {
            unsigned short bits = 0;
            memcpy(&bits, chunk + i * o.bytes, o.bytes);
            to[(mn + (o.transposed ? i : 0)) * mn_pitch + (k + (o.transposed ? 0 : i)) * k_pitch] = p.shape.to_float(bits);
        }
    });
}

// Row and first column of the pair of accumulators 4 j + 2 h, and of the pair of A's elements 2 i + h, if these have 16 bits.
int row_of(int thread, int h) { return 16 * (thread / 32) + thread % 32 / 4 + 8 * h; }
int column_of(int thread, int j) { return 8 * j + thread % 4 * 2; }

void multiply(const Product& p) {
    const int n = p.shape.columns, bytes = p.shape.bytes, depth = 32 / bytes, of_word = 4 / bytes;
    static float a[ROWS][MOST_DEPTH], b[MOST_DEPTH][256];
    if (p.shape.a_in_registers) {
        for (int t = 0; t < THREADS; ++t)
            for (int r = 0; r < 4; ++r)
                for (int e = 0; e < of_word; ++e) {
                    const int column = (r / 2 * 4 + t % 4) * of_word + e;
                    a[row_of(t, r % 2)][column] = p.shape.to_float(p.a[t][r] >> 8 * bytes * e & (1u << 8 * bytes) - 1);
                }
    } else {
        load_operand(p, operand(p.shape.a, p.shape.a_transposed, bytes, p.line), ROWS, a[0], MOST_DEPTH, 1);
    }
    load_operand(p, operand(p.shape.b, p.shape.b_transposed, bytes, p.line), n, b[0], 1, 256);
    static float d[ROWS][256];
    for (int row = 0; row < ROWS; ++row) {
        std::fill(d[row], d[row] + n, 0.0f);
        for (int k = 0; k < depth; ++k)
            for (int column = 0; column < n; ++column) d[row][column] += a[row][k] * b[k][column];
    }
    for (int t = 0; t < THREADS; ++t)
        for (int i = 0; i < n / 2; ++i) {
            float& value = p.accumulators[t]->values[i];
            value = (p.shape.accumulate ? value : 0.0f) + d[row_of(t, i / 2 % 2)][column_of(t, i / 4) + i % 2];
        }
}

void compute(Warpgroup& g, unsigned groups) {
    for (; g.computed < groups; ++g.computed)
        while (g.first_product < g.group_ends[g.computed]) {
            multiply(g.products.front());
            g.products.pop_front();
            ++g.first_product;
        }
}

}  // namespace

void multiply_16x8x16(const float (&a)[16][16], const float (&b)[16][8], float (&d)[16][8]) {
    for (int row = 0; row < 16; ++row) {
        float sums[8] = {};
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 8; ++column) sums[column] += a[row][k] * b[k][column];
        memcpy(d[row], sums, sizeof(sums));
    }
}

void begin_block_wgmma() {
    somebody_waits = false;
    warpgroups.clear();
    warpgroups.resize((fibers.size() + THREADS - 1) / THREADS);
}

void wgmma_fence() { mine(warpgroup()).fenced = true; }

void wgmma_issue(const Wgmma& product, int line) {
    Warpgroup& g = warpgroup();
    ThreadState& t = mine(g);
    if (!t.fenced) report(Kind::WGMMA_FENCE, "no wgmma.fence comes before this wgmma, since the last wait", line);
    const size_t number = t.issued++ - g.first_product;
    if (number == g.products.size()) {
        g.products.push_back({product, line});
        g.products.back().group = t.committed;
    }
    Product& p = g.products[number];
    if (!alike(p.shape, product) || p.line != line || p.group != t.committed)
        report(Kind::DIVERGENT_WARPGROUP, "threads of one warpgroup issue different wgmma, or wgmma of different operands", line, nullptr, p.line);
    const int lane = current->index % THREADS;
    p.accumulators[lane] = hold(t, product, line);
    p.accumulators[lane]->last_group = t.committed;
    memcpy(p.a[lane], product.a_registers, sizeof(p.a[lane]));
    if (launch.checked) {
        if (p.known.empty()) p.known.assign(current->clock, current->clock + new_clock().size());
        unsigned* const known = p.known.data();
        for (size_t i = 0, size = clock_width(); i < size; ++i) known[i] = std::min(known[i], current->clock[i]);
    }
    if (++p.issued == THREADS) check_operands(g, p);
}

void wgmma_commit(int line) {
    Warpgroup& g = warpgroup();
    ThreadState& t = mine(g);
    if (t.committed == g.group_ends.size()) g.group_ends.push_back(t.issued), g.committed.push_back(0);
    ++g.committed[t.committed];
    if (g.group_ends[t.committed++] != t.issued) report(Kind::DIVERGENT_WARPGROUP, "threads of one warpgroup commit different groups of wgmma", line);
    if (somebody_waits) wake(State::AT_WGMMA, [](const Fiber&) { return true; });
    somebody_waits = false;
}

void wgmma_wait(int pending, int line) {
    Warpgroup& g = warpgroup();
    ThreadState& t = mine(g);
    const unsigned done = t.committed > unsigned(pending) ? t.committed - pending : 0;
    while (done && g.committed[done - 1] < THREADS) {
        somebody_waits = true;
        wait_in(State::AT_WGMMA, "the other threads of its warpgroup to commit a group of wgmma", line);
    }
    compute(g, done);
    if (done > t.received) t.fenced = false;
    t.received = std::max(t.received, done);
    if (launch.checked) current->clock[g.agent] = std::max(current->clock[g.agent], done);
    for (auto held = t.held.begin(); held != t.held.end();) {
        if (held->last_group >= done) {
            ++held;
            continue;
        }
        check_untouched(*held, line);
        memcpy(held->registers, held->values.data(), held->values.size() * sizeof(float));
        held = t.held.erase(held);
    }
}

void end_thread_wgmma() {
    const Warpgroup& g = warpgroups[current->index / THREADS];
    if (g.used && !g.threads[current->index % THREADS].held.empty())
        report(Kind::IN_FLIGHT, "a thread ends while a wgmma of it has not been waited for", g.products.empty() ? 0 : g.products.front().line);
}

}  // namespace emulator
