/* Torch operators for linear layers and attention on a few float32 rows, bound by memory and not by arithmetic.
 *
 * A library's matrix product of 2 to 16 rows costs several times that of one row. Here a block of weight rows is read
 * once and used for all rows of x while it is in the cache. The result of a row of x depends on that row alone: every
 * sum runs in the same order whatever else is in the pass, so results are bit-identical with and without speculation.
 *
 * The compiler must not choose how a sum rounds, since it chooses anew for every tile and every type of weight. So it is
 * told never to fuse a product with a sum (-ffp-contract=off), and `fused` says where that happens. Threads share out
 * the results, never the terms of a sum.
 */
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cmath>
#include <cstdint>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int ROWS = 8;                                              // of x whose sums are in registers at once
constexpr int columns_for(int rows) { return rows > 4 ? 2 : 4; }     // of w: 16 sums, 4 or 8 vectors of x, 1 of w
#else
#if defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int ROWS = 4;
constexpr int columns_for(int) { return 2; }                         // 8 sums, 4 vectors of x, 1 of w
#endif
/* Rows of w that a thread takes at a time. With many rows of x, those of a tile should stay in the nearest cache. */
constexpr long block_for(long m) { return m > ROWS ? 32 : 4; }

#define INLINE inline __attribute__((always_inline))
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

INLINE vec load(const float *p) { return *(const vec *)p; }

INLINE vec load(const int8_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

/* bfloat16: floats whose lower halves are zero, stored as their upper halves. Same values, half the bytes to read. */
INLINE vec load(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    ints bits;
    for (int i = 0; i < LANES; i++) bits[i] = (int32_t)((uint32_t)p[i] << 16);
    return (vec)bits;
#endif
}

/* a * b + c, rounded once wherever the processor can do that, and then everywhere. */
#if defined(__AVX512F__)
INLINE vec fused(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__AVX2__) && defined(__FMA__)
INLINE vec fused(vec a, vec b, vec c) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__ARM_NEON) && defined(__aarch64__)
INLINE vec fused(vec a, vec b, vec c) { return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
INLINE vec fused(vec a, vec b, vec c) { return a * b + c; }
#endif
INLINE vec fused(vec a, float b, vec c) { return fused(a, (vec){} + b, c); }

INLINE float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE float widened(float weight) { return weight; }
INLINE float widened(int8_t weight) { return weight; }
INLINE float widened(uint16_t weight) {
    const uint32_t bits = (uint32_t)weight << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

/* Sum the elements of each of four vectors by adding halves repeatedly, in the same order at all four places. */
INLINE void totals(const vec *v, float *out) {
#if defined(__AVX512F__)
    const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
    __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4E));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xB1));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, all)));
#else
    for (int j = 0; j < 4; j++) {
        vec one = v[j];
        for (int half = LANES / 2; half; half /= 2)
            for (int i = 0; i < half; i++) one[i] += one[i + half];
        out[j] = one[0];
    }
#endif
}

/* Compute y[i, j] for some rows of x and of w. */
template <int rows, int columns, typename W>
INLINE void tile(const float *x, const W *w, float *y, long k, long stride) {
    vec sum[(rows * columns + 3) / 4 * 4] = {};
    float out[(rows * columns + 3) / 4 * 4];
    long p = 0;
    for (; p + LANES <= k; p += LANES) {
        vec a[rows];
        for (int i = 0; i < rows; i++) a[i] = load(x + i * k + p);
        for (int j = 0; j < columns; j++) {
            const W *at = w + j * k + p;
            __builtin_prefetch(at + columns * k, 0, 3); // the next tile; without it two cores cannot keep up
            const vec b = load(at);
            for (int i = 0; i < rows; i++) sum[j * rows + i] = fused(a[i], b, sum[j * rows + i]);
        }
    }
    for (int c = 0; c < rows * columns; c += 4) totals(sum + c, out + c);
    for (int j = 0; j < columns; j++)
        for (int i = 0; i < rows; i++) {
            float s = out[j * rows + i];
            for (long q = p; q < k; q++) s = fused(x[i * k + q], widened(w[j * k + q]), s);
            y[i * stride + j] = s;
        }
}

/* Multiply as many rows of x as fit into a tile by `columns` rows of w. */
template <int rows, typename W>
void strip(const float *x, const W *w, float *y, long k, long stride, long columns) {
    constexpr int step = columns_for(rows);
    long j = 0;
    for (; j + step <= columns; j += step) tile<rows, step>(x, w + j * k, y + j, k, stride);
    for (; j < columns; j++) tile<rows, 1>(x, w + j * k, y + j, k, stride);
}

template <typename W, int rows = ROWS>
void strips(const float *x, const void *w, float *y, long k, long stride, long columns, long m) {
    if (m >= rows) {
        strip<rows>(x, (const W *)w, y, k, stride, columns);
        x += rows * k, y += rows * stride, m -= rows;
        if (m) strips<W, rows>(x, w, y, k, stride, columns, m);
    } else if constexpr (rows > 1) {
        strips<W, rows - 1>(x, w, y, k, stride, columns, m);
    }
}

/* One of several matrices that multiply the same rows. Its columns of y begin at `first`. */
struct Matrix {
    const char *weight; // [n, k]: float, int8 or bfloat16, according to `bytes`
    const float *scale; // [n], or null
    const float *bias;  // [n], or null
    long n, first, bytes;

    long blocks(long m) const { return (n + block_for(m) - 1) / block_for(m); }

    void multiply(const float *x, float *y, long m, long k, long stride, long from) const {
        const long columns = std::min(block_for(m), n - from);
        const void *at = weight + from * k * bytes;
        y += first + from;
        if (bytes == 1) strips<int8_t>(x, at, y, k, stride, columns, m);
        else if (bytes == 2) strips<uint16_t>(x, at, y, k, stride, columns, m);
        else strips<float>(x, at, y, k, stride, columns, m);
        for (long i = 0; i < m; i++)
            for (long j = 0; j < columns; j++) {
                float &out = y[i * stride + j];
                if (scale) out *= scale[from + j];
                if (bias) out += bias[from + j];
            }
    }
};

/* Several linear layers on the same rows, side by side. int8 weights have a scale per output, others have none. */
static at::Tensor linears(const at::Tensor &x, at::TensorList weights, at::TensorList scales,
                          const c10::List<std::optional<at::Tensor>> &biases) {
    const at::Tensor rows = x.contiguous();
    const long k = x.size(-1), m = x.numel() / k;
    std::vector<Matrix> matrices;
    long blocks = 0, width = 0;
    for (size_t i = 0; i < weights.size(); i++) {
        const std::optional<at::Tensor> bias = biases[i];
        const float *scale = scales.empty() ? nullptr : scales[i].const_data_ptr<float>();
        matrices.push_back({(const char *)weights[i].const_data_ptr(), scale,
                            bias ? bias->const_data_ptr<float>() : nullptr, weights[i].size(0), width,
                            (long)weights[i].element_size()});
        blocks += matrices.back().blocks(m);
        width += matrices.back().n;
    }
    auto shape = x.sizes().vec();
    shape.back() = width;
    at::Tensor out = at::empty(shape, x.options());
    const float *from = rows.const_data_ptr<float>();
    float *y = out.mutable_data_ptr<float>();
#pragma omp parallel for schedule(static)
    for (long b = 0; b < blocks; b++) {
        long c = 0, j = b;
        while (j >= matrices[c].blocks(m)) j -= matrices[c++].blocks(m);
        matrices[c].multiply(from, y, m, k, width, j * block_for(m));
    }
    return out;
}

/* e to the power of x <= 0, within 2 units in the last place: a Taylor series between half powers of two. */
INLINE vec exponential(vec x) {
    x = x < -87.0f ? (vec){} - 87.0f : x;
    const ints power = __builtin_convertvector(x * 1.44269504f - 0.5f, ints); // truncates, to the nearest as x <= 0
    const vec n = __builtin_convertvector(power, vec);
    const vec rest = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x)); // ln 2 in two parts, for precision
    vec sum = (vec){} + 1.9841270e-4f;
    for (float factor : {1.3888889e-3f, 8.3333333e-3f, 4.1666667e-2f, 1.6666667e-1f, 0.5f, 1.0f, 1.0f})
        sum = fused(sum, rest, (vec){} + factor);
    return sum * (vec)((power + 127) << 23);
}

struct Attention {
    const float *q;           // [tokens, heads, dim]
    const float *keys;        // [pool, kv heads, dim]
    const float *values;
    const float *sinks;       // [heads], or null
    const int64_t *jobs;      // [count, 4]: first token, tokens, first pool entry of the slot, committed entries
    const int64_t *bits;      // [tokens, words]: which entries of this pass a token sees
    const int64_t *positions; // [tokens]
    float *out;               // [tokens, heads, dim]
    long count, heads, kv_heads, dim, words, window;
    float scale, softcap;

    /* Find the entries that a token sees, in the order of the text. */
    void find(const int64_t *job, long token, std::vector<int64_t> &seen) const {
        const long start = window ? std::max(0l, (long)positions[token] - window + 1) : 0;
        seen.resize(std::max(0l, job[3] - start));
        for (size_t i = 0; i < seen.size(); i++) seen[i] = job[2] + start + i;
        for (long i = 0; i < 64 * words; i++)
            if ((uint64_t)bits[token * words + i / 64] >> (i % 64) & 1) seen.push_back(job[2] + job[3] + i);
    }

    /* Compute the scores of four entries with one query. */
    INLINE void score(const float *query, const float *const *four, float *result) const {
        vec part[4] = {};
        long d = 0;
        for (; d + LANES <= dim; d += LANES) {
            const vec a = load(query + d);
            for (int i = 0; i < 4; i++) part[i] = fused(a, load(four[i] + d), part[i]);
        }
        totals(part, result);
        for (int i = 0; i < 4; i++) {
            for (long rest = d; rest < dim; rest++) result[i] = fused(query[rest], four[i][rest], result[i]);
            result[i] *= scale;
            if (softcap > 0) result[i] = std::tanh(result[i] / softcap) * softcap;
        }
    }

    /* Compute the weights of the entries `seen` for one query, before division by their sum, which is returned. */
    float weigh(const float *query, const std::vector<int64_t> &seen, long offset, const float *sink, float *weight) const {
        const long stride = kv_heads * dim, count = seen.size();
        for (long i = 0; i < count; i += 4) {
            const float *four[4];
            for (long j = 0; j < 4; j++) four[j] = keys + seen[std::min(i + j, count - 1)] * stride + offset;
            score(query, four, weight + i);
        }
        constexpr float LEAST = -3e38f;
        for (long i = count; i < count + LANES; i++) weight[i] = LEAST; // pads the last vector; weighs 0
        vec tops = (vec){} + LEAST, parts = {};
        for (long i = 0; i < count; i += LANES) tops = load(weight + i) > tops ? load(weight + i) : tops;
        float top = sink ? *sink : LEAST;
        for (int i = 0; i < LANES; i++) top = std::max(top, tops[i]);
        for (long i = 0; i < count; i += LANES) {
            const vec scores = load(weight + i), shares = exponential(scores - top);
            *(vec *)(weight + i) = scores > LEAST ? shares : (vec){};
            parts += load(weight + i);
        }
        float sum[4];
        const vec alone[4] = {parts};
        totals(alone, sum);
        return sink ? sum[0] + std::exp(*sink - top) : sum[0];
    }

    /* Compute the weighted mean of the values of the entries `seen` for some heads that share them. */
    template <int group>
    void mix(const std::vector<int64_t> &seen, long offset, const float *weight, long room, const float *sums, float *to) const {
        const long stride = kv_heads * dim;
        constexpr int WIDE = 4 / (group > 2 ? 2 : 1); // vectors per head at a time: all sums stay in registers
        long d = 0;
        for (; d + WIDE * LANES <= dim; d += WIDE * LANES) {
            vec part[group][WIDE] = {};
            for (size_t i = 0; i < seen.size(); i++) {
                const float *value = values + seen[i] * stride + offset + d;
                for (int j = 0; j < WIDE; j++)
                    for (int h = 0; h < group; h++)
                        part[h][j] = fused(load(value + j * LANES), weight[h * room + i], part[h][j]);
            }
            for (int h = 0; h < group; h++)
                for (int j = 0; j < WIDE; j++) *(vec *)(to + h * dim + d + j * LANES) = part[h][j] / sums[h];
        }
        for (; d < dim; d++)
            for (int h = 0; h < group; h++) {
                float part = 0;
                for (size_t i = 0; i < seen.size(); i++)
                    part = fused(weight[h * room + i], values[seen[i] * stride + offset + d], part);
                to[h * dim + d] = part / sums[h];
            }
    }

    /* Run attention for one token and the query heads of one key head. */
    void attend(long token, long kv, const std::vector<int64_t> &seen, float *weight, long room) const {
        const long group = heads / kv_heads, offset = kv * dim;
        for (long done = 0; done < group;) {
            const long head = kv * group + done, some = std::min(4l, group - done), at = (token * heads + head) * dim;
            float sums[4];
            for (long h = 0; h < some; h++)
                sums[h] = weigh(q + at + h * dim, seen, offset, sinks ? sinks + head + h : nullptr, weight + h * room);
            if (some == 4) mix<4>(seen, offset, weight, room, sums, out + at);
            else if (some == 3) mix<3>(seen, offset, weight, room, sums, out + at);
            else if (some == 2) mix<2>(seen, offset, weight, room, sums, out + at);
            else mix<1>(seen, offset, weight, room, sums, out + at);
            done += some;
        }
    }

    void run() const {
        long longest = 0;
        for (long j = 0; j < count; j++) longest = std::max(longest, (long)jobs[4 * j + 3]);
        const long room = longest + 64 * words + 2 * LANES;
#pragma omp parallel
        {
            std::vector<int64_t> seen;
            std::vector<float> weight(4 * room);
            seen.reserve(room);
            for (long j = 0; j < count; j++) {
                const int64_t *job = jobs + 4 * j;
#pragma omp for schedule(static) nowait
                for (long task = 0; task < job[1] * kv_heads; task++) {
                    const long token = job[0] + task / kv_heads;
                    find(job, token, seen);
                    attend(token, task % kv_heads, seen, weight.data(), room);
                }
            }
        }
    }
};

static at::Tensor attend(const at::Tensor &q, const at::Tensor &keys, const at::Tensor &values, at::TensorList seen,
                         const std::optional<at::Tensor> &sinks, at::ArrayRef<double> options) {
    const at::Tensor queries = q.contiguous(), &jobs = seen[0], &bits = seen[1], &positions = seen[2];
    at::Tensor out = at::zeros_like(queries);
    Attention{queries.const_data_ptr<float>(), keys.const_data_ptr<float>(), values.const_data_ptr<float>(),
              sinks ? sinks->const_data_ptr<float>() : nullptr, jobs.const_data_ptr<int64_t>(),
              bits.const_data_ptr<int64_t>(), positions.const_data_ptr<int64_t>(), out.mutable_data_ptr<float>(),
              jobs.size(0), q.size(1), keys.size(1), q.size(2), bits.size(1), (long)options[1], (float)options[0],
              (float)options[2]}.run();
    return out;
}

TORCH_LIBRARY_IMPL(outpace_cpu, CPU, library) {
    library.impl("linears", linears);
    library.impl("attend", attend);
}
