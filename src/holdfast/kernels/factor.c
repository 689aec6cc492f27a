/* Products with a factor F (t rows, ld apart) that is stored in bfloat16 or int8, and a step of Adam with
 * its penalty: one read of F each, widened in registers, accumulated in float32. Reading fewer bytes is the whole
 * gain, so the arithmetic must keep up with memory: several rows and a register of columns at a time, in blocks of
 * columns whose sums stay in the cache and which are long enough for the processor to fetch ahead. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16 }; /* numbers in a register */
#else
enum { LANES = 8 };
#endif
enum { BLOCK = 16384, STEP = 8192 }; /* columns of a product, and bytes of a row while it is stepped */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline float widen_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float widen_int8(int8_t x) { return (float)x; }

static inline float widen_float32(float x) { return x; }

static inline lanes load_float32(const float *p) { return *(const lanes *)p; }

#if defined(__AVX512F__) /* compilers widen bytes by a detour */
static inline lanes load_int8(const int8_t *p) {
    return (lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

static inline lanes load_bfloat16(const uint16_t *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return (lanes)_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
#elif defined(__AVX2__)
static inline lanes load_int8(const int8_t *p) {
    return (lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

static inline lanes load_bfloat16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return (lanes)_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
#else
static inline lanes load_int8(const int8_t *p) {
    lanes x;
    for (int i = 0; i < LANES; i++) x[i] = widen_int8(p[i]);
    return x;
}

static inline lanes load_bfloat16(const uint16_t *p) {
    lanes x;
    for (int i = 0; i < LANES; i++) x[i] = widen_bfloat16(p[i]);
    return x;
}
#endif

static inline float total(lanes x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

/* project: u += F d.    lift: g += alpha * F' u, the last columns first: they are still in the cache. */
#define DEFINE(NAME, TYPE)                                                                            \
    void project_##NAME(const TYPE *F, int64_t ld, int64_t t, int64_t n, const float *d, float *u) {  \
        for (int64_t first = 0; first < n; first += BLOCK) {                                          \
            int64_t width = n - first < BLOCK ? n - first : BLOCK, k = 0;                             \
            const float *x = d + first;                                                               \
            for (; k + 4 <= t; k += 4) {                                                              \
                const TYPE *a = F + k * ld + first, *b = a + ld, *c = b + ld, *e = c + ld;            \
                lanes v0 = {0}, v1 = {0}, v2 = {0}, v3 = {0};                                         \
                int64_t j = 0;                                                                        \
                for (; j + LANES <= width; j += LANES) {                                              \
                    lanes y = load_float32(x + j);                                                    \
                    v0 += load_##NAME(a + j) * y;                                                     \
                    v1 += load_##NAME(b + j) * y;                                                     \
                    v2 += load_##NAME(c + j) * y;                                                     \
                    v3 += load_##NAME(e + j) * y;                                                     \
                }                                                                                     \
                float s0 = total(v0), s1 = total(v1), s2 = total(v2), s3 = total(v3);                 \
                for (; j < width; j++) {                                                              \
                    s0 += widen_##NAME(a[j]) * x[j];                                                  \
                    s1 += widen_##NAME(b[j]) * x[j];                                                  \
                    s2 += widen_##NAME(c[j]) * x[j];                                                  \
                    s3 += widen_##NAME(e[j]) * x[j];                                                  \
                }                                                                                     \
                u[k] += s0, u[k + 1] += s1, u[k + 2] += s2, u[k + 3] += s3;                           \
            }                                                                                         \
            for (; k < t; k++) {                                                                      \
                const TYPE *a = F + k * ld + first;                                                   \
                lanes v = {0};                                                                        \
                int64_t j = 0;                                                                        \
                for (; j + LANES <= width; j += LANES)                                                \
                    v += load_##NAME(a + j) * load_float32(x + j);                                    \
                float s = total(v);                                                                   \
                for (; j < width; j++) s += widen_##NAME(a[j]) * x[j];                                \
                u[k] += s;                                                                            \
            }                                                                                         \
        }                                                                                             \
    }                                                                                                 \
                                                                                                      \
    void lift_##NAME(const TYPE *F, int64_t ld, int64_t t, int64_t n, const float *u, float alpha,    \
                     float *g) {                                                                      \
        float sum[BLOCK];                                                                             \
        for (int64_t first = (n - 1) / BLOCK * BLOCK; first >= 0; first -= BLOCK) {                   \
            int64_t width = n - first < BLOCK ? n - first : BLOCK, k = 0;                             \
            memset(sum, 0, width * sizeof *sum);                                                      \
            for (; k + 8 <= t; k += 8) {                                                              \
                const TYPE *row[8];                                                                   \
                for (int i = 0; i < 8; i++) row[i] = F + (k + i) * ld + first;                        \
                int64_t j = 0;                                                                        \
                for (; j + LANES <= width; j += LANES) {                                              \
                    lanes even = load_float32(sum + j), odd = {0};                                    \
                    for (int i = 0; i < 8; i += 2) { /* two chains, which do not wait */              \
                        even += u[k + i] * load_##NAME(row[i] + j);                                   \
                        odd += u[k + i + 1] * load_##NAME(row[i + 1] + j);                            \
                    }                                                                                 \
                    *(lanes *)(sum + j) = even + odd;                                                 \
                }                                                                                     \
                for (; j < width; j++)                                                                \
                    for (int i = 0; i < 8; i++) sum[j] += u[k + i] * widen_##NAME(row[i][j]);         \
            }                                                                                         \
            for (; k < t; k++) {                                                                      \
                const TYPE *a = F + k * ld + first;                                                   \
                int64_t j = 0;                                                                        \
                for (; j + LANES <= width; j += LANES)                                                \
                    *(lanes *)(sum + j) += u[k] * load_##NAME(a + j);                                 \
                for (; j < width; j++) sum[j] += u[k] * widen_##NAME(a[j]);                           \
            }                                                                                         \
            for (int64_t j = 0; j < width; j++) g[first + j] += alpha * sum[j];                       \
        }                                                                                             \
    }

DEFINE(float32, float)
DEFINE(bfloat16, uint16_t)
DEFINE(int8, int8_t)

/* A step of Adam; moved becomes the difference, as rounded. */
static void adam(float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                 float *restrict moved, int64_t n, float new1, float new2, float step_size, float root,
                 float epsilon) {
    memcpy(moved, p, n * sizeof *p);
    for (int64_t j = 0; j < n; j++) {
        m[j] += new1 * (g[j] - m[j]);
        v[j] += new2 * (g[j] * g[j] - v[j]);
        p[j] -= step_size * (m[j] / (sqrtf(v[j]) / root + epsilon));
    }
    for (int64_t j = 0; j < n; j++) moved[j] = p[j] - moved[j];
}

/* Adam with gradient g + F' w; moved += F (new parameters - old ones). A block of columns is used twice, the
 * second time from the cache. */
#define DEFINE_STEP(NAME, TYPE)                                                                       \
    void step_##NAME(const TYPE *F, int64_t ld, int64_t t, int64_t n, const float *w, float *moved,   \
                     float *point, const float *gradient, float *first, float *second, float new1,    \
                     float new2, float step_size, float root, float epsilon) {                        \
        enum { COLUMNS = STEP / sizeof(TYPE) };                                                       \
        float sum[COLUMNS], change[COLUMNS];                                                          \
        for (int64_t start = 0; start < n; start += COLUMNS) {                                        \
            int64_t width = n - start < COLUMNS ? n - start : COLUMNS;                                \
            memcpy(sum, gradient + start, width * sizeof *sum);                                       \
            lift_##NAME(F + start, ld, t, width, w, 1, sum);                                          \
            adam(point + start, sum, first + start, second + start, change, width, new1, new2,        \
                 step_size, root, epsilon);                                                           \
            project_##NAME(F + start, ld, t, width, change, moved);                                   \
        }                                                                                             \
    }

DEFINE_STEP(float32, float)
DEFINE_STEP(bfloat16, uint16_t)
DEFINE_STEP(int8, int8_t)
