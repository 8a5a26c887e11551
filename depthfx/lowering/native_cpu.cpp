// fp32 decode kernels for CPUs: plain C ABI, no PyTorch headers; built and loaded by native.py.
//
// Letters: T rows, M rows of a linear, N outputs, K inputs, Hq / Hkv query / KV heads, G = Hq / Hkv, D head dim,
// B tokens of a block. Pointers are to float unless named otherwise; strides count elements. Every output is computed by
// one thread in an order that depends neither on the number of threads nor on the other rows: results are the same bits
// at any batch size and any thread count.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// ---------------------------------------------------------------------------------------------------- vectors

#if defined(__AVX512F__)
constexpr int VL = 16;       // lanes of a vector
constexpr int MAX_ACCS = 24;  // accumulators that fit the register file beside the operands
#elif defined(__AVX2__)
constexpr int VL = 8;
constexpr int MAX_ACCS = 12;
#else
constexpr int VL = 4;
constexpr int MAX_ACCS = 8;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef float vf_unaligned __attribute__((vector_size(VL * 4), aligned(4), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
inline void store(float* p, vf v) { *reinterpret_cast<vf_unaligned*>(p) = v; }
inline vf splat(float x) { return x - vf{}; }
inline vf pick(vi mask, vf a, vf b) { return mask ? a : b; }
inline vf vmax(vf a, vf b) { return pick(a > b, a, b); }  // b where either is NaN

inline vf load_part(const float* p, int n) {  // lanes from n on are zero
#if defined(__AVX512F__)
    return reinterpret_cast<vf>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p));
#else
    vf v{};
    std::memcpy(&v, p, sizeof(float) * n);
    return v;
#endif
}

inline void store_part(float* p, vf v, int n) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), reinterpret_cast<__m512>(v));
#else
    std::memcpy(p, &v, sizeof(float) * n);
#endif
}

inline vf load_some(const float* p, int64_t n) { return n >= VL ? load(p) : load_part(p, static_cast<int>(n)); }
inline void store_some(float* p, vf v, int64_t n) {
    if (n >= VL) store(p, v);
    else store_part(p, v, static_cast<int>(n));
}

inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return reinterpret_cast<vf>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__AVX2__) && defined(__FMA__)
    return reinterpret_cast<vf>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
    return a * b + c;
#endif
}

inline float sum(vf v) {
    float s[VL];
    store(s, v);
    for (int half = VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) s[i] += s[i + half];
    return s[0];
}

inline float highest(vf v) {
    float best = v[0];
    for (int i = 1; i < VL; ++i) best = v[i] > best ? v[i] : best;
    return best;
}

// A loaded operand stays in a register instead of being loaded anew by each instruction that uses it.
#if defined(__AVX512F__)
#define KEEP_IN_REGISTER(v) asm("" : "+v"(v))
#elif defined(__AVX2__)
#define KEEP_IN_REGISTER(v) asm("" : "+x"(v))
#else
#define KEEP_IN_REGISTER(v) (void)(v)
#endif

// Lane j of the result is the sum of the lanes of a[j]; always the same tree.
inline vf sum_each(const vf* a) {
#if defined(__AVX512F__)
    __m512 b[8], c[4];
    for (int i = 0; i < 8; ++i) {
        const __m512 x = reinterpret_cast<__m512>(a[2 * i]), y = reinterpret_cast<__m512>(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    }
    for (int i = 0; i < 4; ++i) c[i] = _mm512_add_ps(_mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0x44), _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0xEE));
    const __m512 lo = _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x44), _mm512_shuffle_f32x4(c[0], c[1], 0xEE));
    const __m512 hi = _mm512_add_ps(_mm512_shuffle_f32x4(c[2], c[3], 0x44), _mm512_shuffle_f32x4(c[2], c[3], 0xEE));
    return reinterpret_cast<vf>(_mm512_add_ps(_mm512_shuffle_f32x4(lo, hi, 0x88), _mm512_shuffle_f32x4(lo, hi, 0xDD)));
#else
    vf s{};
    for (int j = 0; j < VL; ++j) s[j] = sum(a[j]);
    return s;
#endif
}

// exp with a relative error below 1.5e-7; 0 below -87.3, saturating above 88.3; NaN stays NaN.
inline vf vexp(vf x) {
    const vi tiny = x < splat(-87.3f);
    x = pick(tiny, splat(-87.3f), x);
    x = pick(x > splat(88.3f), splat(88.3f), x);
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const vf shifted = fma(x, splat(1.44269504088896341f), magic);
    const vf n = shifted - magic;
    vf r = fma(n, splat(-0.693145751953125f), x);
    r = fma(n, splat(-1.42860682030941723e-6f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    const vi bits = (reinterpret_cast<vi>(shifted) << 23) + 0x3f800000;  // 2^n; the magic's own bits leave at the top
    return pick(tiny, vf{}, p * reinterpret_cast<vf>(bits));
}

inline float exp1(float x) { return vexp(splat(x))[0]; }

inline vf vtanh(vf x) {
    const vf a = pick(x < vf{}, -x, x), z = x * x;
    vf p = splat(-5.70498872745e-3f);
    p = fma(p, z, splat(2.06390887954e-2f));
    p = fma(p, z, splat(-5.37397155531e-2f));
    p = fma(p, z, splat(1.33314422036e-1f));
    p = fma(p, z, splat(-3.33332819422e-1f));
    const vf small = fma(p * z, x, x);
    const vf big = splat(1.0f) - splat(2.0f) / (vexp(a + a) + splat(1.0f));
    return pick(a < splat(0.625f), small, pick(x < vf{}, -big, big));
}

inline vf verf(vf x) {  // rational minimax approximation on [-4, 4]
    x = pick(x > splat(4.0f), splat(4.0f), pick(x < splat(-4.0f), splat(-4.0f), x));
    const vf z = x * x;
    vf p = splat(-2.72614225801306e-10f);
    for (const float c : {2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f, -7.34990630326855e-04f, -2.95459980854025e-03f, -1.60960333262415e-02f})
        p = fma(p, z, splat(c));
    vf q = splat(-1.45660718464996e-05f);
    for (const float c : {-2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f, -1.42647390514189e-02f}) q = fma(q, z, splat(c));
    return x * p / q;
}

enum Activation { NONE = 0, SILU = 1, GELU_TANH = 2, GELU = 3 };

inline vf activate(int kind, vf g) {
    const vf one = splat(1.0f);
    if (kind == SILU) return g / (one + vexp(-g));
    if (kind == GELU_TANH) return splat(0.5f) * g * (one + vtanh(splat(0.7978845608028654f) * fma(splat(0.044715f) * g * g, g, g)));
    return splat(0.5f) * g * (one + verf(g * splat(0.7071067811865476f)));
}

// ---------------------------------------------------------------------------------------------------- linear

constexpr int MAX_MB = 8;       // rows of x in one pass over a group of weight rows
constexpr int MAX_M = 32;       // rows of a call
constexpr int MAX_CHUNK = 48;   // outputs that a thread takes at a time; a multiple of each group size below
constexpr int GROUPS[] = {8, 6, 4, 3, 2, 1};

// tile[m * ldt + r] = x[m] . w[r] for MB rows of x and R rows of w; `ahead` prefetches the next R rows.
template <int R, int MB>
void dots(const float* __restrict x, int64_t ldx, const float* __restrict w, int64_t K, bool ahead, float* __restrict tile, int ldt) {
    constexpr int COUNT = (R * MB + VL - 1) / VL * VL;
    vf acc[COUNT] = {};  // [MB, R]
    const int64_t next = ahead ? R * K : 0;
    int64_t k = 0;
    for (; k + VL <= K; k += VL) {
        vf wv[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            wv[r] = load(w + r * K + k);
            __builtin_prefetch(w + next + r * K + k, 0, 3);
        }
#pragma GCC unroll 8
        for (int m = 0; m < MB; ++m) {
            vf xv = load(x + m * ldx + k);
            KEEP_IN_REGISTER(xv);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) acc[m * R + r] = fma(wv[r], xv, acc[m * R + r]);
        }
    }
    if (k < K) {
        const int rest = static_cast<int>(K - k);
#pragma GCC unroll 8
        for (int m = 0; m < MB; ++m) {
            const vf xv = load_part(x + m * ldx + k, rest);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) acc[m * R + r] = fma(load_part(w + r * K + k, rest), xv, acc[m * R + r]);
        }
    }
    float sums[COUNT];
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i += VL) store(sums + i, sum_each(acc + i));
    for (int m = 0; m < MB; ++m)
        for (int r = 0; r < R; ++r) tile[m * ldt + r] = sums[m * R + r];
}

template <int R>
void dots_any(int mb, const float* x, int64_t ldx, const float* w, int64_t K, bool ahead, float* tile, int ldt) {
#define CASE(MB)                                                          \
    case MB:                                                              \
        if constexpr (R == 1 || R * MB <= MAX_ACCS) dots<R, MB>(x, ldx, w, K, ahead, tile, ldt); \
        break;
    switch (mb) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
}

// tile[m * ldt + i] = x[m] . w[i] for all M rows of x and `rows` rows of w; w comes from memory once.
void dot_rows(const float* x, int64_t ldx, int M, int mb, int group, const float* w, int64_t K, int rows, float* tile, int ldt) {
    for (int i = 0; i < rows;) {
        const int take = rows - i >= group ? group : 1;
        for (int m = 0; m < M; m += mb) {
            const int count = std::min(mb, M - m);
            const float* xm = x + m * ldx;
            const float* wi = w + i * K;
            float* out = tile + m * ldt + i;
            switch (take) {
                case 8: dots_any<8>(count, xm, ldx, wi, K, m == 0, out, ldt); break;
                case 6: dots_any<6>(count, xm, ldx, wi, K, m == 0, out, ldt); break;
                case 4: dots_any<4>(count, xm, ldx, wi, K, m == 0, out, ldt); break;
                case 3: dots_any<3>(count, xm, ldx, wi, K, m == 0, out, ldt); break;
                case 2: dots_any<2>(count, xm, ldx, wi, K, m == 0, out, ldt); break;
                default: dots_any<1>(count, xm, ldx, wi, K, m == 0, out, ldt); break;
            }
        }
        i += take;
    }
}

float* scratch(int slot, size_t floats) {  // grows, is kept; one set for each thread
    static thread_local std::vector<float> buffers[2];
    if (buffers[slot].size() < floats + 16) buffers[slot].resize(floats + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(buffers[slot].data()) + 63) / 64 * 64);
}

// ---------------------------------------------------------------------------------------------------- stored weights

// A weight of two bytes, see kernels/_dual_weight.py: coding 1 is E4M3, 2 is E5M2; not full: the upper byte alone. `ordered`: groups of 64
// columns are in fragment order. With a shift, row n is 2^shift[n] times the number.
struct Stored {
    const uint8_t *upper, *lower;
    const int8_t* shift;
    int64_t K;
    int coding;
    bool full, ordered;
};

constexpr int GROUP_COLUMNS = 64;

// Codes of float16 for n <= 64 stored places.
inline void codes_of(const Stored& w, const uint8_t* __restrict upper, const uint8_t* __restrict lower, int n, uint16_t* __restrict codes) {
    if (w.coding == 1 && w.full) {
        for (int i = 0; i < n; ++i) {
            const uint16_t u = upper[i], l = lower[i], high = static_cast<uint16_t>((u & 0x7F) - (l >> 7)) >> 1;
            codes[i] = static_cast<uint16_t>((u & 0x80) << 8 | high << 8 | l);
        }
    } else if (w.coding == 1) {
        for (int i = 0; i < n; ++i) {
            const uint16_t u = upper[i];
            codes[i] = static_cast<uint16_t>((u & 0x80) << 8 | (u & 0x7F) << 7);
        }
    } else if (w.full) {
        for (int i = 0; i < n; ++i) {
            const uint16_t u = upper[i];
            codes[i] = static_cast<uint16_t>((u << 8) + static_cast<int8_t>(lower[i]));
        }
    } else {
        for (int i = 0; i < n; ++i) codes[i] = static_cast<uint16_t>(upper[i] << 8);
    }
}

// float16 to float32, every code.
inline float widened(uint32_t code) {
    const uint32_t fraction = code & 0x3FF, exponent = code >> 10 & 31;
    const float small = static_cast<float>(static_cast<int32_t>(fraction)) * 0x1p-24f;
    uint32_t bits = ((code & 0x7FFF) << 13) + (112u << 23);
    if (exponent == 0) std::memcpy(&bits, &small, 4);
    if (exponent == 31) bits = 0x7F800000u | fraction << 13;
    bits |= (code & 0x8000) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void widen(const uint16_t* codes, int n, float scale, float* out) {
    int i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i))), _mm512_set1_ps(scale)));
#elif defined(__AVX2__) && defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i))), _mm256_set1_ps(scale)));
#endif
    for (; i < n; ++i) out[i] = widened(codes[i]) * scale;
}

// Row n in float32, columns in plain order.
void join_row(const Stored& w, int64_t n, float* out) {
    const uint8_t *upper = w.upper + n * w.K, *lower = w.lower + n * w.K;
    // an E4M3 byte has 2^-8 times its value in these bits, which is what fast mode wants
    const float scale = w.shift ? std::ldexp(1.0f, w.shift[n]) : 1.0f;
    uint16_t stored[GROUP_COLUMNS], plain[GROUP_COLUMNS];
    for (int64_t k = 0; k < w.K; k += GROUP_COLUMNS) {
        const int count = static_cast<int>(std::min<int64_t>(GROUP_COLUMNS, w.K - k));
        codes_of(w, upper + k, lower + k, w.ordered ? GROUP_COLUMNS : count, stored);
        if (!w.ordered) {
            widen(stored, count, scale, out + k);
            continue;
        }
        for (int c = 0; c < 4; ++c)
            for (int s = 0; s < 4; ++s)
                for (int h = 0; h < 2; ++h) std::memcpy(plain + s * 16 + h * 8 + c * 2, stored + c * 16 + s * 4 + h * 2, 4);
        widen(plain, GROUP_COLUMNS, scale, out + k);
    }
}

// ---------------------------------------------------------------------------------------------------- norms

inline float inverse_rms(const float* x, int64_t n, float eps) {
    vf a{}, b{};
    int64_t i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {
        const vf u = load(x + i), v = load(x + i + VL);
        a = fma(u, u, a);
        b = fma(v, v, b);
    }
    for (; i < n; i += VL) {
        const vf u = load_some(x + i, n - i);
        a = fma(u, u, a);
    }
    return 1.0f / std::sqrt(sum(a + b) / static_cast<float>(n) + eps);
}

inline void scale_row(const float* x, const float* weight, float offset, float inv, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i += VL)
        store_some(y + i, (load_some(weight + i, n - i) + splat(offset)) * (load_some(x + i, n - i) * splat(inv)), n - i);
}

// ---------------------------------------------------------------------------------------------------- attention

constexpr int TILE = 64;    // keys of one online-softmax step
constexpr int SPLIT = 256;  // keys of one work item: fixed, so that results do not depend on the number of threads

struct Attention {
    const float *q, *pool, *sinks;
    const int32_t *positions, *table_rows, *tables;
    float* out;
    int64_t q_row, q_head, block_stride, layer_offset, table_stride;
    int64_t T, Hq, Hkv, B, D;
    float scale, softcap;
    int64_t window;

    int64_t first(int64_t pos) const { return window > 0 ? std::max<int64_t>(0, pos - window + 1) : 0; }
    int64_t splits(int64_t pos) const { return pos < 0 ? 0 : pos / SPLIT - first(pos) / SPLIT + 1; }
};

// scores[j] = q . k[j] for n <= TILE keys of a contiguous run.
inline void score_run(const float* q, const float* k, int n, int64_t D, float* scores) {
    for (int j0 = 0; j0 < n; j0 += VL) {
        vf acc[VL];
        const float* rows[VL];
        for (int j = 0; j < VL; ++j) {
            acc[j] = vf{};
            rows[j] = k + std::min(j0 + j, n - 1) * D;
        }
        int64_t d = 0;
        for (; d + VL <= D; d += VL) {
            const vf qv = load(q + d);
#pragma GCC unroll 16
            for (int j = 0; j < VL; ++j) acc[j] = fma(qv, load(rows[j] + d), acc[j]);
        }
        if (d < D) {
            const int rest = static_cast<int>(D - d);
            const vf qv = load_part(q + d, rest);
            for (int j = 0; j < VL; ++j) acc[j] = fma(qv, load_part(rows[j] + d, rest), acc[j]);
        }
        store_some(scores + j0, sum_each(acc), n - j0);
    }
}

// acc[g][d] += sum_j p[g][j] v[j][d] for C vectors of d and GB heads.
template <int GB, int C>
inline void value_run(const float* p, const float* v, int n, int64_t D, float* acc, int64_t Dp) {
    vf a[GB][C];
    for (int g = 0; g < GB; ++g)
        for (int c = 0; c < C; ++c) a[g][c] = load(acc + g * Dp + c * VL);
    for (int j = 0; j < n; ++j) {
        vf row[C];
        for (int c = 0; c < C; ++c) row[c] = load(v + j * D + c * VL);
        for (int g = 0; g < GB; ++g) {
            const vf w = splat(p[g * TILE + j]);
            for (int c = 0; c < C; ++c) a[g][c] = fma(w, row[c], a[g][c]);
        }
    }
    for (int g = 0; g < GB; ++g)
        for (int c = 0; c < C; ++c) store(acc + g * Dp + c * VL, a[g][c]);
}

template <int GB>
inline void values(const float* p, const float* v, int n, int64_t D, float* acc, int64_t Dp) {
    constexpr int C = GB <= 4 && VL == 16 ? 4 : 2;
    int64_t d = 0;
    for (; d + C * VL <= D; d += C * VL) value_run<GB, C>(p, v + d, n, D, acc + d, Dp);
    for (; d + VL <= D; d += VL) value_run<GB, 1>(p, v + d, n, D, acc + d, Dp);
    if (d == D) return;
    const int rest = static_cast<int>(D - d);
    for (int g = 0; g < GB; ++g) {
        vf a = load(acc + g * Dp + d);
        for (int j = 0; j < n; ++j) a = fma(splat(p[g * TILE + j]), load_part(v + j * D + d, rest), a);
        store(acc + g * Dp + d, a);
    }
}

// Softmax of one tile of one head: raw scores become weights, acc and total follow the new maximum.
inline void soften(const Attention& a, float* s, int n, float* acc, int64_t Dp, float& top, float& total) {
    const float low = -std::numeric_limits<float>::infinity();
    vf best = splat(low);
    for (int j = 0; j < n; j += VL) {
        vf v = load(s + j) * splat(a.scale);
        if (a.softcap > 0.0f) v = splat(a.softcap) * vtanh(v / splat(a.softcap));
        store(s + j, v);
        for (int i = n; i < j + VL; ++i) s[i] = low;
        best = vmax(load(s + j), best);
    }
    const float now = std::max(top, highest(best));
    if (now > top) {
        const vf shrink = vexp(splat(top - now));
        for (int64_t d = 0; d < Dp; d += VL) store(acc + d, load(acc + d) * shrink);
        total *= shrink[0];
        top = now;
    }
    vf part{};
    for (int j = 0; j < n; j += VL) {
        const vf e = vexp(load(s + j) - splat(top));
        store(s + j, e);
        part += e;
    }
    total += sum(part);
}

// Asks for a run of floats in the L2 cache: blocks lie anywhere, so the hardware's own prefetch ends with each of them.
inline void prefetch_run(const float* p, int64_t floats) {
    for (int64_t i = 0; i < floats; i += 16) __builtin_prefetch(p + i, 0, 2);
}

// Keys [begin, end) of row t and KV head h: partial results of each of its G heads as acc[Dp], top, total.
void attend(const Attention& a, int64_t t, int64_t h, int64_t begin, int64_t end, float* partial, int64_t stride) {
    const int64_t G = a.Hq / a.Hkv, Dp = (a.D + VL - 1) / VL * VL, plane = a.Hkv * a.B * a.D;
    const int32_t* table = a.tables + a.table_rows[t] * a.table_stride;
    float* scores = scratch(0, G * TILE);
    for (int64_t g = 0; g < G; ++g) {
        float* acc = partial + g * stride;
        std::fill(acc, acc + Dp + 2, 0.0f);
        acc[Dp] = -std::numeric_limits<float>::infinity();
    }
    for (int64_t j = begin; j < end;) {
        const int64_t stop = std::min(end, (j / TILE + 1) * TILE);
        const int n = static_cast<int>(stop - j);
        for (int64_t i = j; i < stop;) {
            const int64_t next = std::min(stop, (i / a.B + 1) * a.B);
            const float* k = a.pool + table[i / a.B] * a.block_stride + a.layer_offset + (h * a.B + i % a.B) * a.D;
            prefetch_run(k + plane, (next - i) * a.D);  // the values of these keys, then the keys that come next
            if (next < end) {
                const float* following = a.pool + table[next / a.B] * a.block_stride + a.layer_offset + (h * a.B + next % a.B) * a.D;
                prefetch_run(following, (std::min(end, next + next - i) - next) * a.D);
            }
            for (int64_t g = 0; g < G; ++g)
                score_run(a.q + t * a.q_row + (h * G + g) * a.q_head, k, static_cast<int>(next - i), a.D, scores + g * TILE + (i - j));
            i = next;
        }
        for (int64_t g = 0; g < G; ++g) {
            float* acc = partial + g * stride;
            soften(a, scores + g * TILE, n, acc, Dp, acc[Dp], acc[Dp + 1]);
        }
        for (int64_t i = j; i < stop;) {
            const int64_t next = std::min(stop, (i / a.B + 1) * a.B);
            const float* v = a.pool + table[i / a.B] * a.block_stride + a.layer_offset + plane + (h * a.B + i % a.B) * a.D;
            const int count = static_cast<int>(next - i);
            int64_t g = 0;
            for (; g + 4 <= G; g += 4) values<4>(scores + g * TILE + (i - j), v, count, a.D, partial + g * stride, stride);
            for (; g + 3 <= G; g += 3) values<3>(scores + g * TILE + (i - j), v, count, a.D, partial + g * stride, stride);
            for (; g < G; ++g) values<1>(scores + g * TILE + (i - j), v, count, a.D, partial + g * stride, stride);
            i = next;
        }
        j = stop;
    }
}

// Joins the `n` partial results of one head (`step` floats apart) and its sink into out[D].
void join(const Attention& a, int64_t head, const float* partial, int64_t n, int64_t step, float* out) {
    const int64_t Dp = (a.D + VL - 1) / VL * VL;
    float top = a.sinks ? a.sinks[head] : -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < n; ++i) top = std::max(top, partial[i * step + Dp]);
    float total = a.sinks ? exp1(a.sinks[head] - top) : 0.0f;
    for (int64_t i = 0; i < n; ++i) total += partial[i * step + Dp + 1] * exp1(partial[i * step + Dp] - top);
    for (int64_t d = 0; d < a.D; d += VL) {
        vf sum{};
        for (int64_t i = 0; i < n; ++i) sum = fma(splat(exp1(partial[i * step + Dp] - top)), load(partial + i * step + d), sum);
        store_some(out + d, sum / splat(total), a.D - d);
    }
}

inline int64_t slot_of(const int32_t* tables, int64_t table_stride, int32_t row, int32_t pos, int64_t B, int64_t block_stride, int64_t D) {
    return tables[row * table_stride + pos / B] * block_stride + pos % B * D;
}

// out = rotate-half of x[D] over its first R elements; the others are copied.
inline void rotate(const float* x, const float* cos, const float* sin, int64_t R, int64_t D, float* out) {
    const int64_t half = R / 2;
    for (int64_t i = 0; i < half; i += VL) {
        const int64_t n = half - i;
        const vf a = load_some(x + i, n), b = load_some(x + half + i, n);
        const vf low = a * load_some(cos + i, n) - b * load_some(sin + i, n);
        const vf high = b * load_some(cos + half + i, n) + a * load_some(sin + half + i, n);
        store_some(out + i, low, n);
        store_some(out + half + i, high, n);
    }
    if (R < D) std::memcpy(out + R, x + R, sizeof(float) * (D - R));
}

// y[m, n] = x[m] . w[n] + bias[n] + residual[m, n]; with an activation w and bias hold 2N rows, gates then ups, and
// y[m, n] = act(gate) * up + residual[m, n]. Each byte of w is read from memory once. `rows_of(n, count)` gives rows of w,
// at most `most` at a time (0: any number).
template <class Rows>
void small_linear(const float* x, int64_t ldx, const Rows& rows_of, const float* bias, const float* residual, int64_t ldr, float* y, int64_t ldy,
                  int64_t M, int64_t N, int64_t K, int activation, int threads, int most) {
    const int passes = static_cast<int>((M + MAX_MB - 1) / MAX_MB);
    const int mb = static_cast<int>((M + passes - 1) / passes);
    int group = 1;
    for (const int candidate : GROUPS)
        if (candidate * mb <= MAX_ACCS) {
            group = candidate;
            break;
        }
    const int chunk = N >= int64_t{MAX_CHUNK} * 8 * threads ? MAX_CHUNK : MAX_CHUNK / 2;
    const int64_t chunks = (N + chunk - 1) / chunk;
    const int take = most ? std::max(group, most / group * group) : chunk;  // rows of w that are asked for together
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && N * K > 16384)
    for (int64_t c = 0; c < chunks; ++c) {
        const int64_t n0 = c * chunk;
        const int rows = static_cast<int>(std::min<int64_t>(chunk, N - n0));
        float tile[2][MAX_M * MAX_CHUNK];
        for (int i = 0; i < rows; i += take) {
            const int count = std::min(take, rows - i);
            dot_rows(x, ldx, static_cast<int>(M), mb, group, rows_of(n0 + i, count), K, count, tile[0] + i, chunk);
            if (activation) dot_rows(x, ldx, static_cast<int>(M), mb, group, rows_of(N + n0 + i, count), K, count, tile[1] + i, chunk);
        }
        for (int64_t m = 0; m < M; ++m)
            for (int i = 0; i < rows; i += VL) {
                const int64_t rest = rows - i;
                vf v = load_some(tile[0] + m * chunk + i, rest);
                if (bias) v += load_some(bias + n0 + i, rest);
                if (activation) {
                    vf up = load_some(tile[1] + m * chunk + i, rest);
                    if (bias) up += load_some(bias + N + n0 + i, rest);
                    v = activate(activation, v) * up;
                }
                if (residual) v += load_some(residual + m * ldr + n0 + i, rest);
                store_some(y + m * ldy + n0 + i, v, rest);
            }
    }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------- C interface

extern "C" {

int dfx_lanes() { return VL; }

void dfx_small_linear(const float* x, int64_t ldx, const float* w, const float* bias, const float* residual, int64_t ldr, float* y, int64_t ldy,
                      int64_t M, int64_t N, int64_t K, int activation, int threads) {
    const auto rows_of = [=](int64_t n, int) { return w + n * K; };
    small_linear(x, ldx, rows_of, bias, residual, ldr, y, ldy, M, N, K, activation, threads, 0);
}

// The same over a weight of two bytes, joined a few rows at a time: the same bits as over the joined weight.
void dfx_stored_linear(const float* x, int64_t ldx, const uint8_t* upper, const uint8_t* lower, const int8_t* shift, int coding, int full, int ordered,
                       const float* bias, float* y, int64_t ldy, int64_t M, int64_t N, int64_t K, int activation, int threads) {
    const Stored w{upper, lower, shift, K, coding, full != 0, ordered != 0};
    const auto rows_of = [&w](int64_t n, int count) {
        float* joined = scratch(0, count * w.K);
        for (int i = 0; i < count; ++i) join_row(w, n + i, joined + i * w.K);
        return static_cast<const float*>(joined);
    };
    small_linear(x, ldx, rows_of, bias, nullptr, 0, y, ldy, M, N, K, activation, threads, 8);
}

// The weight [N, K] in float32, columns in plain order.
void dfx_join_weight(const uint8_t* upper, const uint8_t* lower, const int8_t* shift, int coding, int full, int ordered, float* out, int64_t N, int64_t K,
                     int threads) {
    const Stored w{upper, lower, shift, K, coding, full != 0, ordered != 0};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && N * K > 16384)
    for (int64_t n = 0; n < N; ++n) join_row(w, n, out + n * K);
}

void dfx_paged_decode_attention(const float* q, int64_t q_row, int64_t q_head, const float* pool, int64_t block_stride, int64_t layer_offset,
                                const int32_t* positions, const int32_t* table_rows, const int32_t* tables, int64_t table_stride, float scale,
                                int64_t window, float softcap, const float* sinks, float* out, int64_t T, int64_t Hq, int64_t Hkv, int64_t B,
                                int64_t D, int threads) {
    const Attention a{q,     pool,         sinks, positions, table_rows, tables, out, q_row, q_head, block_stride, layer_offset,
                      table_stride, T,     Hq,    Hkv,       B,          D,      scale, softcap, window};
    const int64_t G = Hq / Hkv, Dp = (D + VL - 1) / VL * VL, stride = Dp + VL, step = Hq * stride;
    std::vector<int64_t> starts(T + 1, 0);  // first work item of each row
    int64_t keys = 0;
    for (int64_t t = 0; t < T; ++t) {
        starts[t + 1] = starts[t] + a.splits(positions[t]);
        if (positions[t] >= 0) keys += positions[t] + 1 - a.first(positions[t]);
    }
    const int64_t items = starts[T];
    float* partials = scratch(1, std::max<int64_t>(1, items) * step);
#pragma omp parallel num_threads(threads) if (threads > 1 && keys * Hq * D > 32768)
    {
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t item = 0; item < items; ++item)
            for (int64_t h = 0; h < Hkv; ++h) {
                const int64_t t = std::upper_bound(starts.begin(), starts.end(), item) - starts.begin() - 1;
                const int64_t first = a.first(positions[t]), part = first / SPLIT + (item - starts[t]);
                const int64_t begin = std::max<int64_t>(first, part * SPLIT), end = std::min<int64_t>(positions[t] + 1, (part + 1) * SPLIT);
                attend(a, t, h, begin, end, partials + item * step + h * G * stride, stride);
            }
#pragma omp for collapse(2) schedule(static)
        for (int64_t t = 0; t < T; ++t)
            for (int64_t head = 0; head < Hq; ++head) {
                float* o = out + (t * Hq + head) * D;
                if (positions[t] < 0) std::fill(o, o + D, 0.0f);
                else join(a, head, partials + starts[t] * step + head * stride, starts[t + 1] - starts[t], step, o);
            }
    }
}

// One pass over the packed projections: norm (optional), rotate, write K and V, return q.
void dfx_rotary_append(const float* qkv, int64_t ldx, const float* cos, int64_t ldc, const float* sin, int64_t lds, int64_t R, const float* q_norm,
                       const float* k_norm, float eps, float* pool, int64_t block_stride, int64_t layer_offset, const int32_t* positions,
                       const int32_t* table_rows, const int32_t* tables, int64_t table_stride, float* q, int64_t T, int64_t Hq, int64_t Hkv,
                       int64_t B, int64_t D, int threads) {
    const int64_t heads = Hq + 2 * Hkv;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (threads > 1 && T * heads * D > 32768)
    for (int64_t t = 0; t < T; ++t)
        for (int64_t h = 0; h < heads; ++h) {
            const float* x = qkv + t * ldx + h * D;
            const int32_t pos = positions[t];
            float* target = q + (t * Hq + h) * D;
            if (h >= Hq) {
                if (pos < 0) continue;
                const int64_t plane = h - Hq;  // K heads, then V heads: the order inside a layer of a block
                target = pool + slot_of(tables, table_stride, table_rows[t], pos, B, block_stride, D) + layer_offset + plane * B * D;
            }
            if (h >= Hq + Hkv) {
                std::memcpy(target, x, sizeof(float) * D);
                continue;
            }
            const float* weight = h < Hq ? q_norm : k_norm;
            float* normed = scratch(0, D);
            if (weight) scale_row(x, weight, 0.0f, inverse_rms(x, D, eps), normed, D);
            rotate(weight ? normed : x, cos + t * ldc, sin + t * lds, R, D, target);
        }
}

void dfx_kv_append(const float* k, int64_t k_row, int64_t k_head, const float* v, int64_t v_row, int64_t v_head, float* pool, int64_t block_stride,
                   int64_t layer_offset, const int32_t* positions, const int32_t* table_rows, const int32_t* tables, int64_t table_stride, int64_t T,
                   int64_t Hkv, int64_t B, int64_t D, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && T * Hkv * D > 32768)
    for (int64_t t = 0; t < T; ++t) {
        if (positions[t] < 0) continue;
        float* at = pool + slot_of(tables, table_stride, table_rows[t], positions[t], B, block_stride, D) + layer_offset;
        for (int64_t h = 0; h < Hkv; ++h) {
            std::memcpy(at + h * B * D, k + t * k_row + h * k_head, sizeof(float) * D);
            std::memcpy(at + (Hkv + h) * B * D, v + t * v_row + h * v_head, sizeof(float) * D);
        }
    }
}

// y = norm(x) * (weight + offset); with a residual first total = x + residual, which is normed instead.
void dfx_rms_norm(const float* x, int64_t ldx, const float* residual, int64_t ldr, const float* weight, float offset, float eps, float* total,
                  float* y, int64_t T, int64_t H, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && T * H > 65536)
    for (int64_t t = 0; t < T; ++t) {
        const float* row = x + t * ldx;
        if (residual) {
            float* s = total + t * H;
            for (int64_t i = 0; i < H; i += VL) store_some(s + i, load_some(row + i, H - i) + load_some(residual + t * ldr + i, H - i), H - i);
            row = s;
        }
        scale_row(row, weight, offset, inverse_rms(row, H, eps), y + t * H, H);
    }
}

// out[t, f] = act(x[t, f]) * x[t, F + f]
void dfx_gated_activation(const float* x, int64_t ldx, float* out, int64_t T, int64_t F, int activation, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && T > 1 && T * F > 65536)
    for (int64_t t = 0; t < T; ++t)
        for (int64_t f = 0; f < F; f += VL) {
            const vf gate = load_some(x + t * ldx + f, F - f), up = load_some(x + t * ldx + F + f, F - f);
            store_some(out + t * F + f, activate(activation, gate) * up, F - f);
        }
}

}  // extern "C"
