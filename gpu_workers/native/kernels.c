/* What a forward pass on CPU needs and torch has no good form of.
 *
 * One source for every CPU: GCC's and clang's vector types become AVX-512, AVX2 or whatever the
 * compiler is told to use. Intrinsics stand only where those say too little: bf16 dot products
 * and rounding, transposition, reductions.
 *
 * Everything matrix-like is built from one micro-kernel over 32-bit *units*: one fp32 number, or
 * two neighbouring bf16 numbers along the axis that is summed over. A *panel* holds the right-hand
 * side of a product as [units][columns], so that a vector is one unit of neighbouring columns.
 * Each element of a result is summed in the same order whatever the other rows are, so a token's
 * numbers do not depend on what shares its batch.
 *
 * Nothing is allocated and nothing is checked here: native_kernels.py knows the shapes.
 */

#include "elements.h"

/* Vectors of a micro-kernel's tile: 6 * 4 sums, 4 columns and a row fit AVX-512's 32 registers,
 * 6 * 2 + 2 + 1 fit 16. */
#if LANES == 16
#define VECTORS 4
#else
#define VECTORS 2
#endif

enum { COLUMNS = 64 };         /* of a panel: of a weight's outputs, or of keys */
enum { TILE_ROWS = 6 };        /* most rows of a micro-kernel */
enum { BLOCK_ROWS = 48 };      /* rows that share one pass over a panel or a tile of keys */
enum { BLOCK_UNITS = 1024 };   /* of a weight's panel: 256 KiB, to stay in the L2 cache */
enum { MAX_HEAD_DIM = 256 };

/* ---- sums, maxima, powers ------------------------------------------------------------------ */

INLINE float sum_of(vf x) {
#if LANES == 16
    return _mm512_reduce_add_ps((__m512)x);
#else
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
#endif
}

INLINE float max_of(vf x) {
#if LANES == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
#endif
}

/* e^x for x <= 88, relative error below 2e-7; below -87 about 1e-38. x = n ln 2 + f with
 * |f| <= ln 2 / 2; 2^n is made from bits, e^f is its Taylor polynomial. Adding 1.5 * 2^23 rounds
 * to an integer; ln 2 is subtracted in two parts so that the product of the first is exact. */
INLINE vf exponential(vf x) {
    const float shift = 12582912.0f;
    x = vmax(x, spread(-87.0f));
    vf n = x * 1.44269504f + shift;
    vi exponent = (vi)n << 23; /* the integer is in n's lowest bits; the shift's own bits go */
    n -= shift;
    vf f = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf y = f * (1.0f / 720) + 1.0f / 120;
    y = y * f + 1.0f / 24;
    y = y * f + 1.0f / 6;
    y = y * f + 0.5f;
    y = y * f + 1.0f;
    y = y * f + 1.0f;
    return (vf)((vi)y + exponent);
}

/* ---- memory --------------------------------------------------------------------------------- */

/* Write to each page without changing it, so that memory is behind it; others may write meanwhile. */
void touch_pages(char *start, int64_t bytes, int64_t page_bytes) {
    for (char *p = start; p < start + bytes; p += page_bytes)
        __atomic_fetch_or(p, 0, __ATOMIC_RELAXED);
}

/* ---- element-wise --------------------------------------------------------------------------- */

/* Weights of an RMSNorm, or of a LayerNorm where `centred`: (width) each, bias may be NULL. */
typedef struct {
    const void *weight, *bias;
    int64_t width;
    float eps;
    int32_t centred, type;
} Norm;

INLINE void norm_row(const Norm *norm, const void *x, void *residual, void *out, int centred,
                     int type) {
    const int64_t width = norm->width;
    if (residual) {
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t n = width - i;
            vf sum = load(at(residual, i, type), n, type) + load(at(x, i, type), n, type);
            store(at(residual, i, type), sum, n, type);
        }
        x = residual; /* the rounded sum is what is normed */
    }
    vf sum = {0}, squares = {0};
    if (centred)
        for (int64_t i = 0; i < width; i += LANES) sum += load(at(x, i, type), width - i, type);
    vf mean = spread(sum_of(sum) / width);
    for (int64_t i = 0; i < width; i += LANES) {
        vf deviation = load(at(x, i, type), width - i, type) - mean;
        if (centred) deviation = first_lanes(deviation, (vf){0}, width - i);
        squares += deviation * deviation;
    }
    vf factor = spread(1.0f / __builtin_sqrtf(sum_of(squares) / width + norm->eps));
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t n = width - i;
        vf y = (load(at(x, i, type), n, type) - mean) * factor;
        y *= load(at(norm->weight, i, type), n, type);
        if (norm->bias) y += load(at(norm->bias, i, type), n, type);
        store(at(out, i, type), y, n, type);
    }
}

INLINE void norm_rows(const Norm *norm, const void *x, void *residual, void *out, int64_t rows,
                      int centred, int type) {
    for (int64_t start = 0; start < rows * norm->width; start += norm->width)
        norm_row(norm, at(x, start, type), residual ? at(residual, start, type) : NULL,
                 at(out, start, type), centred, type);
}

/* out = norm(x), or, with a residual, residual += x and out = norm(residual). All (rows, width). */
void apply_norm(const Norm *norm, const void *x, void *residual, void *out, int64_t rows) {
    if (norm->type == F32) norm_rows(norm, x, residual, out, rows, norm->centred, F32);
    else if (norm->centred) norm_rows(norm, x, residual, out, rows, 1, BF16);
    else norm_rows(norm, x, residual, out, rows, 0, BF16);
}

INLINE void silu_mul_rows(const void *gate_up, void *out, int64_t rows, int64_t width, int type) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            int64_t n = width - i;
            vf gate = load(at(gate_up, row * 2 * width + i, type), n, type);
            vf up = load(at(gate_up, row * 2 * width + width + i, type), n, type);
            /* e^x is bounded by 88 where it would overflow; silu is 0 there in any case. */
            vf e = exponential(-vmax(gate, spread(-87.0f)));
            store(at(out, row * width + i, type), gate * up / (1.0f + e), n, type);
        }
}

/* (rows, 2 width), gate first -> (rows, width): silu(gate) * up. */
void silu_mul(const void *gate_up, void *out, int64_t rows, int64_t width, int type) {
    if (type == F32) silu_mul_rows(gate_up, out, rows, width, F32);
    else silu_mul_rows(gate_up, out, rows, width, BF16);
}

/* ---- the micro-kernel ----------------------------------------------------------------------- */

/* sum + a . b, unit by unit. */
INLINE vf dot(vf sum, vu a, vu b, int type) {
    if (type == F32) return sum + (vf)a * (vf)b;
#if defined(__AVX512BF16__) && LANES == 16
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    const uint32_t high = 0xffff0000;
    sum += (vf)(a << 16) * (vf)(b << 16);
    return sum + (vf)(a & high) * (vf)(b & high);
#endif
}

/* Both sides of a product: rows of units, and a panel. Strides count units. `ahead`, or NULL, is as
 * much memory as the panel takes and will be wanted next: it is prefetched meanwhile. */
typedef struct {
    const uint32_t *rows;
    int64_t row_stride;
    const uint32_t *panel;
    int64_t panel_stride;
    int64_t units;
    const uint32_t *ahead;
} Product;

/* c = rows x panel, or c += ... with `add`: `rows` x `vectors` vectors of columns, both constant.
 * `num_ahead` cache lines are asked for in each unit. */
INLINE void tile(const Product *product, float *c, int64_t c_stride, int add, int num_ahead,
                 int rows, int vectors, int type) {
    vf sums[TILE_ROWS][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            sums[r][v] = add ? load_f32(c + r * c_stride + v * LANES) : (vf){0};
    const uint32_t *a = product->rows, *b = product->panel;
    const uint32_t *ahead = product->ahead;
    const int64_t row_stride = product->row_stride;
    for (int64_t u = 0; u < product->units; u++, a++, b += product->panel_stride) {
        for (int line = 0; line < num_ahead; line++, ahead += 16)
            __builtin_prefetch(ahead, 0, 2);
        vu columns[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) memcpy(&columns[v], b + v * LANES, sizeof(vu));
        UNROLL for (int r = 0; r < rows; r++) {
            vu unit = a[r * row_stride] - (vu){0};
            UNROLL for (int v = 0; v < vectors; v++)
                sums[r][v] = dot(sums[r][v], unit, columns[v], type);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            store_f32(c + r * c_stride + v * LANES, sums[r][v]);
}

INLINE void tile_of(const Product *product, float *c, int64_t c_stride, int add, int num_ahead,
                    int64_t rows, int vectors, int type) {
    switch (rows) {
    case 1: tile(product, c, c_stride, add, num_ahead, 1, vectors, type); break;
    case 2: tile(product, c, c_stride, add, num_ahead, 2, vectors, type); break;
    case 3: tile(product, c, c_stride, add, num_ahead, 3, vectors, type); break;
    case 4: tile(product, c, c_stride, add, num_ahead, 4, vectors, type); break;
    case 5: tile(product, c, c_stride, add, num_ahead, 5, vectors, type); break;
    default: tile(product, c, c_stride, add, num_ahead, 6, vectors, type); break;
    }
}

/* The whole product: `rows` x `columns`, a multiple of LANES. Rows are dealt out evenly to tiles,
 * so that 8 rows are 4 + 4 and not 6 + 2: few sums leave the multipliers waiting. So is the memory
 * ahead (4 lines for a unit of COLUMNS), lest one tile waits for it and the others compute. */
INLINE void multiply_as(Product product, float *c, int64_t c_stride, int add, int64_t rows,
                        int64_t columns, int type) {
    const int64_t wide = VECTORS * LANES;
    const int64_t num_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t num_parts = num_tiles * (columns / wide);
    int64_t to_ask = product.ahead ? 4 * product.units : 0;
    int num_ahead = num_parts < 4 ? 2 : 1;
    for (int64_t t = 0; t < num_tiles; t++) {
        const int64_t first = rows * t / num_tiles, count = rows * (t + 1) / num_tiles - first;
        Product part = product;
        part.rows += first * product.row_stride;
        float *to = c + first * c_stride;
        int64_t done = 0;
        for (; done + wide <= columns; done += wide, part.panel += wide) {
            if (to_ask <= 0) num_ahead = 0;
            tile_of(&part, to + done, c_stride, add, num_ahead, count, VECTORS, type);
            part.ahead += num_ahead * 16 * product.units, to_ask -= num_ahead * product.units;
        }
        for (; done < columns; done += LANES, part.panel += LANES)
            tile_of(&part, to + done, c_stride, add, 0, count, 1, type);
        product.ahead = part.ahead;
    }
}

/* Compiled once for each type, as all the micro-kernels are in here. */
OUTLINE void multiply_bf16(const Product *product, float *c, int64_t c_stride, int add,
                           int64_t rows, int64_t columns) {
    multiply_as(*product, c, c_stride, add, rows, columns, BF16);
}

OUTLINE void multiply_f32(const Product *product, float *c, int64_t c_stride, int add,
                          int64_t rows, int64_t columns) {
    multiply_as(*product, c, c_stride, add, rows, columns, F32);
}

INLINE void multiply(const Product *product, float *c, int64_t c_stride, int add, int64_t rows,
                     int64_t columns, int type) {
    if (type == F32) multiply_f32(product, c, c_stride, add, rows, columns);
    else multiply_bf16(product, c, c_stride, add, rows, columns);
}

/* ---- linear layers -------------------------------------------------------------------------- */

/* (outputs, inputs) bf16 -> [outputs / 64, rounded up][inputs / 2][64] units, zeros past the end:
 * the layout of oneDNN's own packed weights, so that one copy serves both. inputs is even. */
void pack_weight(const uint32_t *weight, uint32_t *panels, int64_t outputs, int64_t units) {
    for (int64_t first = 0; first < outputs; first += COLUMNS, panels += units * COLUMNS)
        for (int64_t column = 0; column < COLUMNS; column++) {
            const uint32_t *row = weight + (first + column) * units;
            for (int64_t u = 0; u < units; u++)
                panels[u * COLUMNS + column] = first + column < outputs ? row[u] : 0;
        }
}

/* A packed weight (outputs, 2 * units), its bias (outputs) in bf16 or NULL, relu or nothing. */
typedef struct {
    const uint32_t *panels;
    const void *bias;
    int64_t units, outputs;
    int32_t relu;
} Linear;

/* `rows` sums of one panel become outputs: y (rows, outputs) from `column` on. */
INLINE void write_outputs(const Linear *w, const float *sums, void *y, int64_t rows,
                          int64_t column) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < min64(w->outputs - column, COLUMNS); c += LANES) {
            const int64_t left = w->outputs - column - c;
            vf sum = load_f32(sums + r * COLUMNS + c);
            if (w->bias) sum += load(at(w->bias, column + c, BF16), left, BF16);
            if (w->relu) sum = vmax(sum, (vf){0});
            store(at(y, r * w->outputs + column + c, BF16), sum, left, BF16);
        }
}

/* y = x W^T + bias, or relu of it: x (rows, 2 * units) and y (rows, outputs) in bf16. */
void linear(const Linear *w, const uint32_t *x, void *y, int64_t rows) {
    /* One tile's rows leave nothing to overlap: it waits for memory, and the CPU's own stream
     * prefetcher is best left alone. With more, the next panel comes while this one is used. */
    const int is_long = rows > TILE_ROWS;
    const uint32_t *panel = w->panels;
    float sums[BLOCK_ROWS * COLUMNS];
    for (int64_t column = 0; column < w->outputs; column += COLUMNS, panel += w->units * COLUMNS)
        for (int64_t row = 0; row < rows; row += BLOCK_ROWS) {
            const int64_t count = min64(rows - row, BLOCK_ROWS);
            for (int64_t u = 0; u < w->units; u += BLOCK_UNITS) {
                const uint32_t *part = panel + u * COLUMNS;
                const Product product = {x + row * w->units + u, w->units, part, COLUMNS,
                                         min64(w->units - u, BLOCK_UNITS),
                                         is_long && !row ? part + w->units * COLUMNS : NULL};
                multiply(&product, sums, COLUMNS, u > 0, count, COLUMNS, BF16);
            }
            write_outputs(w, sums, at(y, row * w->outputs, BF16), count, column);
        }
}

/* ---- positions and pages -------------------------------------------------------------------- */

/* One batch on one worker's pool; the mirror of native_calls.Step. Indices are int64.
 * pool: [blocks, kv_heads, num_layers, 2 (keys, values), block_size, head_dim].
 * rope: [positions][cosines, sines][head_dim / 2], NULL where positions are learned.
 * positions, slots: of each token; a slot is block * block_size + offset.
 * block_table: [rows, table_width]; computed: of each row, tokens before its new ones.
 * panels: scratch for the keys and values of one head of the longest row, `attention` below. */
typedef struct {
    char *pool;
    const float *rope;
    const int64_t *positions, *slots, *block_table, *computed;
    uint32_t *panels;
    int64_t num_heads, kv_heads, num_layers, block_size, head_dim;
    int64_t num_tokens, num_decode, table_width;
    float scale;
    int32_t type;
} Step;

/* Where the keys of one block, head and layer begin; the values follow at once. */
INLINE char *page(const Step *s, int64_t block, int64_t head, int64_t layer, int type) {
    int64_t plane = ((block * s->kv_heads + head) * s->num_layers + layer) * 2;
    return at(s->pool, plane * s->block_size * s->head_dim, type);
}

/* Rotate the pairs (x[i], x[i + half]) of one head in place. */
INLINE void rotate(void *x, const float *cosines, int64_t half, int type) {
    const float *sines = cosines + half;
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t n = half - i;
        vf x1 = load(at(x, i, type), n, type), x2 = load(at(x, half + i, type), n, type);
        vf c = load(cosines + i, n, F32), s = load(sines + i, n, F32);
        store(at(x, i, type), x1 * c - x2 * s, n, type);
        store(at(x, half + i, type), x2 * c + x1 * s, n, type);
    }
}

INLINE void append_tokens(const Step *s, int64_t layer, char *qkv, int type) {
    int64_t dim = s->head_dim, rotated = s->num_heads + s->kv_heads;
    for (int64_t token = 0; token < s->num_tokens; token++) {
        char *heads = at(qkv, token * (rotated + s->kv_heads) * dim, type);
        if (s->rope)
            for (int64_t head = 0; head < rotated; head++)
                rotate(at(heads, head * dim, type), s->rope + s->positions[token] * dim, dim / 2,
                       type);
        int64_t block = s->slots[token] / s->block_size;
        int64_t offset = s->slots[token] % s->block_size;
        for (int64_t head = 0; head < s->kv_heads; head++) {
            char *keys = page(s, block, head, layer, type);
            char *key = at(heads, (s->num_heads + head) * dim, type);
            memcpy(at(keys, offset * dim, type), key, dim * size_of(type));
            memcpy(at(keys, (s->block_size + offset) * dim, type),
                   at(key, s->kv_heads * dim, type), dim * size_of(type));
        }
    }
}

/* Rotate q and k of qkv (tokens, heads + 2 kv_heads, head_dim) in place, write k and v to their
 * slots. */
void append(const Step *step, int64_t layer, void *qkv) {
    if (step->type == F32) append_tokens(step, layer, qkv, F32);
    else append_tokens(step, layer, qkv, BF16);
}

/* ---- attention ------------------------------------------------------------------------------ */

/* Keys are taken COLUMNS at a time: repacked from their pages into two panels, multiplied by a
 * block of query rows, and summed by the online softmax (Milakov and Gimelshein, arXiv 1805.02867;
 * FlashAttention, arXiv 2205.14135). The rows of a block are queries x heads of a group, so every
 * key and value is read once for the whole group.
 *
 * The panels of a tile: keys [units of head_dim][COLUMNS], then values [units of COLUMNS]
 * [head_dim]; both COLUMNS * units of head_dim long. */

/* Query rows in work: rows and sums [BLOCK_ROWS][head_dim]; the largest score so far, and the sum
 * of the weights, lane by lane. */
typedef struct {
    uint32_t rows[BLOCK_ROWS * MAX_HEAD_DIM];
    float scores[BLOCK_ROWS * COLUMNS];
    uint32_t weights[BLOCK_ROWS * COLUMNS];
    float sums[BLOCK_ROWS * MAX_HEAD_DIM];
    float most[BLOCK_ROWS], totals[BLOCK_ROWS * LANES];
} Queries;

/* Where the keys and values of a tile's tokens are. */
typedef struct {
    const char *keys[COLUMNS], *values[COLUMNS];
} Tokens;

/* A head of one layer of one row's sequence: `length` tokens in the blocks of `table`. */
typedef struct {
    const Step *step;
    const int64_t *table;
    int64_t layer, head, length;
} Sequence;

/* What lies past a sequence's end: keys and values of zero, whatever the pages hold there. */
static const char nothing[4 * MAX_HEAD_DIM];

/* The addresses of COLUMNS keys from `first` on, and of their values. */
INLINE void locate(const Sequence *q, int64_t first, Tokens *tokens, int type) {
    const Step *s = q->step;
    const int64_t bytes = s->head_dim * size_of(type);
    const int64_t count = min64(q->length - first, COLUMNS);
    int64_t index = first / s->block_size, offset = first % s->block_size, done = 0;
    for (; done < count; index++, offset = 0) {
        const char *key = page(s, q->table[index], q->head, q->layer, type) + offset * bytes;
        const int64_t end = min64(count, done + s->block_size - offset);
        for (; done < end; done++, key += bytes) {
            tokens->keys[done] = key;
            tokens->values[done] = key + s->block_size * bytes;
        }
    }
    for (; done < COLUMNS; done++) tokens->keys[done] = tokens->values[done] = nothing;
}

#if LANES == 16
/* Sixteen rows of sixteen units become columns. */
INLINE void transpose(__m512i *x) {
    __m512i y[16];
    UNROLL for (int i = 0; i < 16; i += 4) {
        __m512i ab0 = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        __m512i ab1 = _mm512_unpackhi_epi32(x[i], x[i + 1]);
        __m512i cd0 = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]);
        __m512i cd1 = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
        y[i] = _mm512_unpacklo_epi64(ab0, cd0), y[i + 1] = _mm512_unpackhi_epi64(ab0, cd0);
        y[i + 2] = _mm512_unpacklo_epi64(ab1, cd1), y[i + 3] = _mm512_unpackhi_epi64(ab1, cd1);
    }
    UNROLL for (int i = 0; i < 4; i++) { /* now 4 x 4 blocks of 128 bits */
        __m512i ab0 = _mm512_shuffle_i32x4(y[i], y[i + 4], 0x44);
        __m512i ab1 = _mm512_shuffle_i32x4(y[i], y[i + 4], 0xee);
        __m512i cd0 = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x44);
        __m512i cd1 = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xee);
        x[i] = _mm512_shuffle_i32x4(ab0, cd0, 0x88);
        x[i + 4] = _mm512_shuffle_i32x4(ab0, cd0, 0xdd);
        x[i + 8] = _mm512_shuffle_i32x4(ab1, cd1, 0x88);
        x[i + 12] = _mm512_shuffle_i32x4(ab1, cd1, 0xdd);
    }
}

/* LANES keys of `units` units each, a multiple of 8 -> columns of a panel. */
INLINE void pack_keys(const char *const *keys, uint32_t *panel, int64_t units) {
    __m512i x[16];
    for (int64_t u = 0; u < units; u += 16) {
        const int64_t count = min64(units - u, 16);
        UNROLL for (int i = 0; i < 16; i++) {
            const char *from = keys[i] + 4 * u;
            x[i] = count == 16 ? _mm512_loadu_si512(from)
                               : _mm512_castsi256_si512(_mm256_loadu_si256((const void *)from));
        }
        transpose(x);
        UNROLL for (int i = 0; i < 16; i++)
            if (i < 8 || count == 16) _mm512_storeu_si512(panel + (u + i) * COLUMNS, x[i]);
    }
}
#else
INLINE void pack_keys(const char *const *keys, uint32_t *panel, int64_t units) {
    for (int i = 0; i < LANES; i++)
        for (int64_t u = 0; u < units; u++) memcpy(panel + u * COLUMNS + i, keys[i] + 4 * u, 4);
}
#endif

/* One unit's worth of value rows: an fp32 row as it is, or two bf16 rows interleaved. */
INLINE void pack_values(const char *const *values, uint32_t *panel, int64_t dim, int type) {
    for (int64_t d = 0; d < dim; d += LANES) {
        vu x = (vu)load(at(values[0], d, type), LANES, type);
        if (type == BF16) x = (x >> 16) | (vu)load(at(values[1], d, type), LANES, type);
        memcpy(panel + d, &x, sizeof x);
    }
}

/* The next tile, and how many of its tokens have been asked for. */
typedef struct {
    Tokens tokens;
    int done;
} Ahead;

/* Prefetch a few more tokens into the L2 cache. Few at a time, and often: a long run of prefetches
 * waits for memory, and all that follows waits with it. */
INLINE void ask(Ahead *ahead, int count, int64_t row_bytes) {
    for (; count && ahead->done < COLUMNS; ahead->done++, count--)
        for (int64_t byte = 0; byte < row_bytes; byte += 64) {
            __builtin_prefetch(ahead->tokens.keys[ahead->done] + byte, 0, 2);
            __builtin_prefetch(ahead->tokens.values[ahead->done] + byte, 0, 2);
        }
}

/* Repack a tile of keys and values. */
INLINE void pack_tile(const Tokens *tokens, Ahead *ahead, uint32_t *panel, int64_t dim, int type) {
    const int64_t units = units_of(dim, type), row_bytes = 4 * units;
    uint32_t *values = panel + units * COLUMNS;
    const int rows = type == BF16 ? 2 : 1;
    for (int first = 0; first < COLUMNS; first += LANES) {
        ask(ahead, 6, row_bytes);
        pack_keys(tokens->keys + first, panel + first, units);
        ask(ahead, 6, row_bytes);
        for (int i = first; i < first + LANES; i += rows)
            pack_values(tokens->values + i, values + i / rows * dim, dim, type);
    }
}

/* Scores of one query row over a tile become weights: in proportion to e^(score - maximum so far);
 * what was summed under a smaller maximum shrinks. `visible` keys of the tile are not ahead of the
 * query; scale is positive. */
INLINE void soften(Queries *q, int64_t row, int64_t visible, float scale, int64_t dim, int type) {
    const vf hidden = spread(-__builtin_inff());
    float *scores = q->scores + row * COLUMNS;
    vf most = hidden, total = {0};
    if (visible < COLUMNS)
        for (int i = 0; i < COLUMNS; i += LANES)
            store_f32(scores + i, first_lanes(load_f32(scores + i), hidden, visible - i));
    UNROLL for (int i = 0; i < COLUMNS; i += LANES) most = vmax(most, load_f32(scores + i));
    const float before = q->most[row], tile_most = max_of(most) * scale;
    const float now = tile_most > before ? tile_most : before;
    /* A hidden key's weight is e^-87: nothing beside the largest one's, which is 1. */
    UNROLL for (int i = 0; i < COLUMNS; i += LANES) {
        vf weight = exponential(load_f32(scores + i) * scale - now);
        total += weight;
        store(at(q->weights, row * COLUMNS + i, type), weight, LANES, type);
    }
    float *sums = q->sums + row * dim, *totals = q->totals + row * LANES;
    if (now > before) {
        vf shrink = exponential(spread(before - now));
        q->most[row] = now;
        store_f32(totals, load_f32(totals) * shrink);
        for (int64_t d = 0; d < dim; d += LANES) store_f32(sums + d, load_f32(sums + d) * shrink);
    }
    store_f32(totals, load_f32(totals) + total);
}

/* Let `rows` query rows see one packed tile, whose first key is `first`. Row r stands for the query
 * at position `position + r / group`. */
INLINE void attend(Queries *q, const Step *s, const uint32_t *panel, int64_t first, int64_t rows,
                   int64_t position, int64_t group, Ahead *ahead, int type) {
    const int64_t dim = s->head_dim, units = units_of(dim, type), depth = units_of(COLUMNS, type);
    const Product scores = {q->rows, units, panel, COLUMNS, units, NULL};
    multiply(&scores, q->scores, COLUMNS, 0, rows, COLUMNS, type);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t visible = position + row / group + 1 - first;
        ask(ahead, 4, 4 * units);
        soften(q, row, visible, s->scale, dim, type);
    }
    ask(ahead, COLUMNS, 4 * units);
    const Product values = {q->weights, depth, panel + units * COLUMNS, dim, depth, NULL};
    multiply(&values, q->sums, dim, 1, rows, dim, type);
}

/* Copy `count` queries' heads of one group out of qkv as rows, and forget what was summed. */
INLINE void begin(Queries *q, const char *qkv, int64_t token_bytes, int64_t count, int64_t group,
                  int64_t dim, int type) {
    const int64_t bytes = group * dim * size_of(type);
    for (int64_t i = 0; i < count; i++)
        memcpy((char *)q->rows + i * bytes, qkv + i * token_bytes, bytes);
    memset(q->sums, 0, count * group * dim * sizeof(float));
    memset(q->totals, 0, count * group * LANES * sizeof(float));
    for (int64_t row = 0; row < count * group; row++) q->most[row] = -__builtin_inff();
}

/* Divide by the sum of the weights and write `count` queries' heads to their places. */
INLINE void finish(const Queries *q, char *out, int64_t token_bytes, int64_t count, int64_t group,
                   int64_t dim, int type) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t g = 0; g < group; g++) {
            const float *sums = q->sums + (i * group + g) * dim;
            vf factor = spread(1.0f / sum_of(load_f32(q->totals + (i * group + g) * LANES)));
            for (int64_t d = 0; d < dim; d += LANES)
                store(at(out + i * token_bytes, g * dim + d, type), load_f32(sums + d) * factor,
                      LANES, type);
        }
}

/* One KV head of one row: the last `num_new` of `length` tokens attend to all up to themselves.
 * Panels are packed when a query first needs them; a row of one block of queries needs each only
 * once, so it packs them all into the same place. */
INLINE void attend_head(const Sequence *seq, const Sequence *after, const char *qkv, char *out,
                        int64_t num_new, int type) {
    const Step *s = seq->step;
    const int64_t dim = s->head_dim, group = s->num_heads / s->kv_heads;
    const int64_t token_bytes = (s->num_heads + 2 * s->kv_heads) * dim * size_of(type);
    const int64_t out_bytes = s->num_heads * dim * size_of(type);
    const int64_t block = BLOCK_ROWS / group, past = seq->length - num_new;
    const int64_t tile_units = num_new <= block ? 0 : 2 * units_of(dim, type) * COLUMNS;
    int64_t num_packed = 0;
    Ahead ahead;
    Queries queries;
    locate(seq, 0, &ahead.tokens, type);
    for (int64_t done = 0; done < num_new; done += block) {
        int64_t count = min64(block, num_new - done), last = past + done + count;
        begin(&queries, qkv + done * token_bytes, token_bytes, count, group, dim, type);
        for (int64_t first = 0; first < last; first += COLUMNS) {
            uint32_t *panel = s->panels + first / COLUMNS * tile_units;
            if (first == num_packed) {
                num_packed += COLUMNS;
                const Tokens tokens = ahead.tokens;
                if (num_packed < seq->length) locate(seq, num_packed, &ahead.tokens, type);
                else locate(after, 0, &ahead.tokens, type);
                ahead.done = 0;
                pack_tile(&tokens, &ahead, panel, dim, type);
            }
            attend(&queries, s, panel, first, count * group, past + done, group, &ahead, type);
        }
        finish(&queries, out + done * out_bytes, out_bytes, count, group, dim, type);
    }
}

INLINE void attend_row(const Step *s, int64_t layer, int64_t row, const char *qkv, char *out,
                       int64_t num_new, int type) {
    const int64_t group = s->num_heads / s->kv_heads, bytes = group * s->head_dim * size_of(type);
    const int64_t *table = s->block_table + row * s->table_width;
    for (int64_t head = 0; head < s->kv_heads; head++) {
        Sequence seq = {s, table, layer, head, s->computed[row] + num_new}, after = seq;
        after.head++;
        if (after.head == s->kv_heads) { /* then comes the next decode row, if there is one */
            after.head = 0;
            after.table += s->table_width;
            after.length = row + 1 < s->num_decode ? s->computed[row + 1] + 1 : 0;
        }
        attend_head(&seq, &after, qkv + head * bytes, out + head * bytes, num_new, type);
    }
}

OUTLINE void attend_row_bf16(const Step *s, int64_t layer, int64_t row, const char *qkv, char *out,
                             int64_t num_new) {
    attend_row(s, layer, row, qkv, out, num_new, BF16);
}

OUTLINE void attend_row_f32(const Step *s, int64_t layer, int64_t row, const char *qkv, char *out,
                            int64_t num_new) {
    attend_row(s, layer, row, qkv, out, num_new, F32);
}

/* Attention of one row's `num_new` tokens, whose qkv begins at `qkv`, into `out`
 * (num_new, heads * head_dim). Reads keys and values from the pages only. */
void attention(const Step *s, int64_t layer, int64_t row, const void *qkv, void *out,
               int64_t num_new) {
    if (s->type == F32) attend_row_f32(s, layer, row, qkv, out, num_new);
    else attend_row_bf16(s, layer, row, qkv, out, num_new);
}

/* The same for all of a batch's decode rows: its first `num_decode` rows and tokens. */
void decode_attention(const Step *s, int64_t layer, const void *qkv, void *out) {
    const int64_t out_width = s->num_heads * s->head_dim;
    const int64_t qkv_width = out_width + 2 * s->kv_heads * s->head_dim;
    for (int64_t row = 0; row < s->num_decode; row++)
        attention(s, layer, row, at(qkv, row * qkv_width, s->type),
                  at(out, row * out_width, s->type), 1);
}
