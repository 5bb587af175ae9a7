// CUDA's words for g++: each thread is a fiber, warps and CTAs meet as on a GPU, and every poll lets the others go on.
// What inline assembly does, emulated.py replaces by the emulate_* calls here. Orders of memory accesses that only hardware has
// don't come up; indices, protocols, barriers and arithmetic do.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <functional>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(bytes) alignas(bytes)

using std::max;
using std::min;

struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct alignas(8) float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

// ---- threads ---------------------------------------------------------------------------------------------------------

struct Meeting {
    int arrived = 0;
    unsigned turn = 0;
};

struct EmulatedWarp : Meeting {
    unsigned char words[2][32][32];  // what lanes show each other, by parity of the turn
};

struct EmulatedCta : Meeting {
    int index, count, threads, rank;
    int any[2] = {0, 0};
    Meeting named[16];
    std::vector<EmulatedWarp> warps;
    std::vector<unsigned char> shared;
};

struct BulkCopy {
    void* target;
    const void* source;
    unsigned bytes;
    void* barrier;
};

struct Fiber {
    ucontext_t context;  // where it begins
    jmp_buf left_at;     // where it goes on: swapcontext would make a system call each time
    EmulatedCta* cta;
    int thread;
    bool started = false, done = false;
    const unsigned* watched = nullptr;  // it has nothing to do while this is `unwanted`
    unsigned unwanted = 0;
    std::vector<BulkCopy> stores;
    std::vector<std::vector<std::function<void()>>> products{1};  // wgmma's, by groups; the last one isn't committed

    bool waits() const { return watched && *watched == unwanted; }
};

inline Fiber* running;
inline jmp_buf scheduler;
inline void (*kernel_of_rank)(int rank);
inline std::vector<BulkCopy> loads;  // on their way
void land(const BulkCopy& load);

// What is known of an mbarrier beyond its 8 bytes.
struct Phases {
    long owed = 0;  // bytes
    bool by_copies = false;
    unsigned ended = 0, awaited = 0;
};
inline std::map<void*, Phases> phases;

inline void let_others_run() {
    if (!_setjmp(running->left_at)) _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void resume(Fiber* fiber) {
    running = fiber;
    if (_setjmp(scheduler)) return;
    if (std::exchange(fiber->started, true)) _longjmp(fiber->left_at, 1);
    setcontext(&fiber->context);
}

inline void wait_while(const unsigned& word, unsigned unwanted) {
    running->watched = &word, running->unwanted = unwanted;
    while (word == unwanted) let_others_run();
    running->watched = nullptr;
}

inline void meet(Meeting& meeting, int threads) {
    const unsigned turn = meeting.turn;
    if (++meeting.arrived == threads) {
        meeting.arrived = 0;
        ++meeting.turn;
    } else {
        wait_while(meeting.turn, turn);
    }
}

inline void run_fiber() {
    kernel_of_rank(running->cta->rank);
    if (running->products.size() != 1 || !running->products[0].empty()) std::abort();  // nobody has waited for them
    running->done = true;
    let_others_run();
}

// Runs all CTAs of all ranks. False if they don't end within so many seconds.
inline bool run_grids(int ranks, int grid, int threads, size_t shared_bytes, double limit_s) {
    constexpr size_t kStackBytes = 128 << 10;
    static std::vector<std::unique_ptr<unsigned char[]>> stacks;  // of this launch and the next
    std::vector<EmulatedCta> ctas(ranks * grid);
    std::vector<std::unique_ptr<Fiber>> fibers;
    for (int i = 0; i < ranks * grid; ++i) {
        EmulatedCta& cta = ctas[i];
        cta.index = i % grid, cta.count = grid, cta.threads = threads, cta.rank = i / grid;
        cta.warps.resize(threads / 32);
        cta.shared.assign(shared_bytes + 128, 0xcd);
        for (int thread = 0; thread < threads; ++thread) {
            auto fiber = std::make_unique<Fiber>();
            fiber->cta = &cta, fiber->thread = thread;
            if (stacks.size() == fibers.size()) stacks.emplace_back(new unsigned char[kStackBytes]);
            getcontext(&fiber->context);
            fiber->context.uc_stack = {stacks[fibers.size()].get(), 0, kStackBytes};
            fiber->context.uc_link = nullptr;
            makecontext(&fiber->context, run_fiber, 0);
            fibers.push_back(std::move(fiber));
        }
    }
    phases.clear(), loads.clear();  // a launch that didn't end leaves some
    const auto begin = std::chrono::steady_clock::now();
    unsigned random = 1;  // another thread begins each round
    std::vector<Fiber*> alive;
    for (auto& fiber : fibers) alive.push_back(fiber.get());
    while (!alive.empty()) {
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > limit_s) return false;
        std::vector<Fiber*> left;
        random = random * 1664525u + 1013904223u;
        for (size_t i = 0; i < alive.size(); ++i) {
            Fiber* fiber = alive[(i + random) % alive.size()];
            if (!fiber->waits()) resume(fiber);
            if (!fiber->done) left.push_back(fiber);
        }
        for (const BulkCopy& load : std::exchange(loads, {})) land(load);
        alive.swap(left);
    }
    // A copy that no thread waits for may come after its CTA's end.
    for (const auto& [barrier, its] : phases)
        if (its.by_copies && (its.owed != 0 || its.awaited != its.ended)) std::abort();
    return true;
}

struct ThreadIndex {
    operator int() const { return running->thread; }
};
struct CtaIndex {
    operator int() const { return running->cta->index; }
};
struct CtaCount {
    operator int() const { return running->cta->count; }
};
inline struct { ThreadIndex x; } threadIdx;
inline struct { CtaIndex x; } blockIdx;
inline struct { CtaCount x; } gridDim;

inline unsigned char* emulate_shared() {
    return reinterpret_cast<unsigned char*>((reinterpret_cast<size_t>(running->cta->shared.data()) + 127) & ~size_t{127});
}

// ---- barriers and warps ----------------------------------------------------------------------------------------------

inline void __syncthreads() { meet(*running->cta, running->cta->threads); }
inline void emulate_named_barrier(int id, int threads) { meet(running->cta->named[id], threads); }
inline void emulate_named_barrier_arrive(int id, int threads) {
    Meeting& meeting = running->cta->named[id];
    if (++meeting.arrived == threads) meeting.arrived = 0, ++meeting.turn;
}
inline int __syncthreads_or(int value) {
    EmulatedCta& cta = *running->cta;
    const unsigned turn = cta.turn;
    if (cta.arrived == 0) cta.any[turn & 1] = 0;
    cta.any[turn & 1] |= value != 0;
    __syncthreads();
    return cta.any[turn & 1];
}

inline int __syncthreads_and(int value) { return !__syncthreads_or(!value); }

template <typename T>
struct Shown {
    unsigned turn;
    T of(int lane) const {
        T value;
        std::memcpy(&value, running->cta->warps[running->thread / 32].words[turn & 1][lane], sizeof value);
        return value;
    }
};

template <typename T>
Shown<T> show(const T& value) {
    static_assert(sizeof(T) <= 32);
    EmulatedWarp& warp = running->cta->warps[running->thread / 32];
    const unsigned turn = warp.turn;
    std::memcpy(warp.words[turn & 1][running->thread % 32], &value, sizeof value);
    meet(warp, 32);
    return {turn};
}

template <typename T, typename Join>
T reduce(T value, Join join) {
    const Shown<T> shown = show(value);
    T result = shown.of(0);
    for (int lane = 1; lane < 32; ++lane) result = join(result, shown.of(lane));
    return result;
}

inline void __syncwarp() { show(0); }
template <typename T> T __reduce_max_sync(unsigned, T value) { return reduce(value, [](T a, T b) { return max(a, b); }); }
template <typename T> T __reduce_min_sync(unsigned, T value) { return reduce(value, [](T a, T b) { return min(a, b); }); }
template <typename T> T __reduce_add_sync(unsigned, T value) { return reduce(value, [](T a, T b) { return a + b; }); }
inline bool __any_sync(unsigned, bool value) { return reduce(value, [](bool a, bool b) { return a || b; }); }
inline bool __all_sync(unsigned, bool value) { return reduce(value, [](bool a, bool b) { return a && b; }); }
inline unsigned __ballot_sync(unsigned, bool value) { return reduce(unsigned(value) << running->thread % 32, [](unsigned a, unsigned b) { return a | b; }); }
template <typename T> T __shfl_sync(unsigned, T value, int lane) { return show(value).of(lane); }
template <typename T> T __shfl_xor_sync(unsigned, T value, int distance) { return show(value).of(running->thread % 32 ^ distance); }
template <typename T> T __shfl_up_sync(unsigned, T value, int distance) {
    const int lane = running->thread % 32;
    return show(value).of(lane < distance ? lane : lane - distance);
}
template <typename T> T __shfl_down_sync(unsigned, T value, int distance) {
    const int lane = running->thread % 32;
    return show(value).of(lane + distance >= 32 ? lane : lane + distance);
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------

template <typename To, typename From>
To bits_as(From value) {
    To result;
    static_assert(sizeof(To) == sizeof(From));
    std::memcpy(&result, &value, sizeof value);
    return result;
}
inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline float __int_as_float(int bits) { return bits_as<float>(bits); }
inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
// A GPU's sums make but one NaN.
inline int __float_as_int(float value) { return value != value ? 0x7fffffff : bits_as<int>(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __double2float_rn(double value) { return static_cast<float>(value); }
inline int __double2loint(double value) { return static_cast<int>(bits_as<unsigned long long>(value)); }
inline int __double2hiint(double value) { return static_cast<int>(bits_as<unsigned long long>(value) >> 32); }
inline double __hiloint2double(int high, int low) {
    return bits_as<double>(static_cast<unsigned long long>(static_cast<unsigned>(high)) << 32 | static_cast<unsigned>(low));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}
inline float __uint2float_rn(unsigned value) { return static_cast<float>(value); }
inline float __int2float_rn(int value) { return static_cast<float>(value); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }

inline unsigned bf16_of(float value) {
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned emulate_add_bf16x2(unsigned x, unsigned y) {
    const float low = __uint_as_float(x << 16) + __uint_as_float(y << 16), high = __uint_as_float(x & 0xffff0000u) + __uint_as_float(y & 0xffff0000u);
    return bf16_of(high) << 16 | bf16_of(low);
}
template <typename Join>
unsigned join_bf16x2(unsigned x, unsigned y, Join join) {
    return join(__uint_as_float(x & 0xffff0000u), __uint_as_float(y & 0xffff0000u)) << 16 | join(__uint_as_float(x << 16), __uint_as_float(y << 16));
}
inline unsigned emulate_above_bf16x2(unsigned x, unsigned y) {
    return join_bf16x2(x, y, [](float a, float b) { return a > b ? 0xffffu : 0u; });
}
inline unsigned emulate_max_bf16x2(unsigned x, unsigned y) {
    return join_bf16x2(x, y, [](float a, float b) { return bf16_of(std::fmax(a, b)); });
}
inline unsigned emulate_min_bf16x2(unsigned x, unsigned y) {
    return join_bf16x2(x, y, [](float a, float b) { return bf16_of(std::fmin(a, b)); });
}
inline unsigned emulate_bf16x2(float high, float low) { return bf16_of(high) << 16 | bf16_of(low); }
// Approximations err as far as the PTX ISA allows, one way or the other.
inline float err(float right, float most) {
    const unsigned mixed = bits_as<unsigned>(right) * 0x9e3779b1u;
    return std::isfinite(right) ? right + (mixed >> 31 ? most : -most) : right;
}
inline float emulate_log2(float x) {
    const float right = std::log2(x);
    return err(right, 0x1p-22f * max(1.0f, std::fabs(right)));
}
inline float emulate_exp2(float x) {
    const float right = std::exp2(x);
    return x == 0.0f ? right : err(right, 0x1p-22f * right);
}

// A product of the i-th elements of two words.
inline void multiply_add(float& acc, unsigned x, unsigned y, int i) {
    acc += __uint_as_float(x >> i * 16 << 16) * __uint_as_float(y >> i * 16 << 16);
}
inline void multiply_add(int& acc, unsigned x, unsigned y, int i) {
    acc += static_cast<signed char>(x >> i * 8) * static_cast<signed char>(y >> i * 8);
}
// mma.m16n8k16 of bf16 and mma.m16n8k32 of int8; fragments as the PTX ISA lays them out.
template <typename Accumulator>
void emulate_mma(Accumulator (&acc)[4], const uint4& a, const uint2& b) {
    constexpr int kPerWord = std::is_same_v<Accumulator, float> ? 2 : 4, kHalf = 4 * kPerWord;
    struct Fragments {
        uint4 a;
        uint2 b;
    };
    // In one: what a lane shows lasts until the show after next.
    const Shown<Fragments> shown = show(Fragments{a, b});
    const int lane = running->thread % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 2 * kHalf; ++k) {
            const uint4 of_row = shown.of(row % 8 * 4 + k % kHalf / kPerWord).a;
            const uint2 of_column = shown.of(column * 4 + k % kHalf / kPerWord).b;
            const unsigned low_rows = k < kHalf ? of_row.x : of_row.z, high_rows = k < kHalf ? of_row.y : of_row.w;
            multiply_add(acc[i], row < 8 ? low_rows : high_rows, k < kHalf ? of_column.x : of_column.y, k % kPerWord);
        }
    }
}

// Where a descriptor's core matrix lies: `first` in k and `second` in rows or columns. All that it has of an address are 18 bits.
inline const unsigned* core_matrix(unsigned long long descriptor, int first, int second) {
    const size_t shared = reinterpret_cast<size_t>(emulate_shared());
    const unsigned at = (descriptor & 0x3fff) << 4, k_stride = (descriptor >> 16 & 0x3fff) << 4, row_stride = (descriptor >> 32 & 0x3fff) << 4;
    return reinterpret_cast<const unsigned*>(shared + ((at - shared + first * k_stride + second * row_stride) & 0x3ffff));
}
// wgmma.m64n(8 * groups), each warp's share by itself, and as late as may be: when its group is waited for. Until then the sums are
// spoilt. a: of a row, a word of 4 bytes of k.
template <int kGroups, typename Accumulator, typename A>
void emulate_rows_of_wgmma(Accumulator (&acc)[kGroups][4], const A& a, unsigned long long b, bool adds) {
    constexpr int kPerWord = std::is_same_v<Accumulator, float> ? 2 : 4;
    const int lane = running->thread % 32;
    for (int group = 0; group < kGroups; ++group)
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            if (!adds) acc[group][i] = 0;
            for (int k = 0; k < 8 * kPerWord; ++k) {
                const int word = k / kPerWord;
                multiply_add(acc[group][i], a(row, word), core_matrix(b, word / 4, group)[column * 4 + word % 4], k % kPerWord);
            }
        }
}
inline void spoil(float& sum) { sum = std::nanf(""); }
inline void spoil(int& sum) { sum = 0x5a5a5a5a; }
template <int kGroups, typename Accumulator>
void spoil_if(bool wanted, Accumulator (&acc)[kGroups][4]) {
    for (auto& group : acc)
        for (auto& sum : group)
            if (wanted) spoil(sum);
}
template <int kGroups, typename Accumulator>
void emulate_wgmma(Accumulator (&acc)[kGroups][4], const uint4& fragment, unsigned long long b, bool adds) {
    const Shown<uint4> shown = show(fragment);
    std::array<uint4, 32> held;
    for (int lane = 0; lane < 32; ++lane) held[lane] = shown.of(lane);
    spoil_if(!adds, acc);
    running->products.back().push_back([=, to = &acc] {
        emulate_rows_of_wgmma(*to, [&](int row, int word) {
            const uint4 of = held[row % 8 * 4 + word % 4];
            return word < 4 ? row < 8 ? of.x : of.y : row < 8 ? of.z : of.w;
        }, b, adds);
    });
}
template <int kGroups, typename Accumulator>
void emulate_wgmma(Accumulator (&acc)[kGroups][4], unsigned long long a, unsigned long long b, bool adds) {
    show(0);  // the whole warp
    const int first = running->thread / 32 % 4 * 2;
    spoil_if(!adds, acc);
    running->products.back().push_back([=, to = &acc] {
        emulate_rows_of_wgmma(*to, [&](int row, int word) { return core_matrix(a, word / 4, first + row / 8)[row % 8 * 4 + word % 4]; }, b, adds);
    });
}
inline void emulate_wgmma_commit() { running->products.emplace_back(); }
inline void emulate_wgmma_wait(int pending) {
    for (int i = 0; i < 3; ++i) let_others_run();
    auto& groups = running->products;
    if (!groups.back().empty()) std::abort();  // not committed
    for (; static_cast<int>(groups.size()) - 1 > pending; groups.erase(groups.begin()))
        for (const auto& product : groups.front()) product();
}

// ---- memory ----------------------------------------------------------------------------------------------------------

template <typename T> T __ldg(const T* address) { return *address; }
inline size_t __cvta_generic_to_global(const void* address) { return reinterpret_cast<size_t>(address); }
inline size_t __cvta_generic_to_shared(const void* address) { return reinterpret_cast<size_t>(address); }
template <typename T, typename V> T atomicExch(T* address, V value) { return std::exchange(*address, static_cast<T>(value)); }
template <typename T, typename V> T atomicAdd(T* address, V value) { return std::exchange(*address, static_cast<T>(*address + value)); }
template <typename T, typename V> T atomicMin(T* address, V value) { return std::exchange(*address, min(*address, static_cast<T>(value))); }

inline void emulate_store_word(unsigned long long at, unsigned long long key, unsigned long long tag) {
    const unsigned long long word[2] = {key, tag};
    std::memcpy(reinterpret_cast<void*>(at), word, sizeof word);
}
template <typename Word>
void emulate_load_word(unsigned long long at, Word& word) {
    let_others_run();
    std::memcpy(&word, reinterpret_cast<const void*>(at), sizeof word);
}
inline unsigned long long emulate_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// An mbarrier's 8 bytes. Its phase ends once all have arrived and no bytes are owed: copies may pay before they are expected.
struct Mbarrier {
    unsigned short pending, arrivals;
    unsigned phase;
};
inline void emulate_mbarrier_init(void* barrier, int arrivals) {
    const Mbarrier made{static_cast<unsigned short>(arrivals), static_cast<unsigned short>(arrivals), 0};
    std::memcpy(barrier, &made, sizeof made);
    phases[barrier] = {};
}
inline void count_mbarrier(void* barrier, int arrivals, long bytes) {
    Mbarrier& it = *static_cast<Mbarrier*>(barrier);
    if (it.pending < arrivals) std::abort();  // more arrive than the phase waits for
    it.pending -= arrivals;
    Phases& its = phases[barrier];
    its.by_copies |= bytes != 0;
    if ((its.owed += bytes) == 0 && it.pending == 0) it.pending = it.arrivals, it.phase ^= 1, ++its.ended;
}
inline void emulate_mbarrier_arrive(void* barrier) { count_mbarrier(barrier, 1, 0); }
inline void emulate_mbarrier_expect(void* barrier, long bytes) { count_mbarrier(barrier, 1, bytes); }
inline void emulate_mbarrier_wait(void* barrier, unsigned parity) {
    wait_while(static_cast<Mbarrier*>(barrier)->phase, parity);
    phases[barrier].awaited = phases[barrier].ended;
}

// Bulk copies are made as late as they may be: loads once all threads have had a turn, stores when their thread waits for them.
inline void land(const BulkCopy& load) {
    std::memcpy(load.target, load.source, load.bytes);
    count_mbarrier(load.barrier, 0, -static_cast<long>(load.bytes));
}
inline void emulate_bulk_load(void* target, const void* source, unsigned bytes, void* barrier) { loads.push_back({target, source, bytes, barrier}); }
inline void emulate_bulk_store(void* target, const void* source, unsigned bytes) { running->stores.push_back({target, source, bytes}); }
inline void emulate_await_bulk_stores() {
    for (const BulkCopy& store : std::exchange(running->stores, {})) std::memcpy(store.target, store.source, store.bytes);
}
