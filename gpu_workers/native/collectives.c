/* Sums and gathers of the workers of one stage, through one piece of memory that all have mapped.
 *
 * The memory holds a state for every rank and, behind them, two slots for every rank. A tensor goes
 * in pieces of at most a slot. A rank copies its piece into its slot, says so in its state, and
 * whoever wants the piece waits for that. Pieces take turns between the two slots: a rank fills
 * the one that it used two pieces ago, and everybody has read that one who has said that the
 * piece in between is there. All ranks make the same calls in the same order.
 *
 * A state counts pieces by twos; its lowest bit says that some rank has left, and is set in all
 * of them, so that it changes the very word that a rank may sleep on. Waiting spins for a short
 * while, for a rank that computes on a core of its own, and then sleeps in the kernel.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "elements.h"

enum { DONE, LATE, GONE }; /* how a call ended */
enum { PIECE = 2, LEFT = 1 };
enum { PAUSES = 32 }; /* between two looks at the clock: about a microsecond */

/* Apart, so that neither is on a cache line that changes when others' do. */
typedef struct {
    _Alignas(64) _Atomic uint32_t state;
    _Alignas(64) _Atomic uint32_t sleepers; /* who want to be woken when it changes */
} Rank;

/* One worker's end. */
typedef struct {
    Rank *ranks;
    char *slots;
    int64_t slot_bytes;
    int64_t spin_ns;
    int64_t timeout_ns;
    int32_t rank;
    int32_t size;
    uint32_t state; /* ours, without LEFT */
} Stage;

/* ---- waiting ------------------------------------------------------------------------------- */

INLINE void rest(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

INLINE int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Counts wrap around. What was said before a rank left is still true. */
INLINE int has_reached(uint32_t state, uint32_t wanted) {
    return (int32_t)((state & ~(uint32_t)LEFT) - wanted) >= 0;
}

static void wake(Rank *rank) {
    if (atomic_load(&rank->sleepers))
        syscall(SYS_futex, &rank->state, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Until the state is no longer `seen`, or the deadline. */
static int sleep_on(Rank *rank, uint32_t seen, int64_t deadline_ns) {
    struct timespec deadline = {deadline_ns / 1000000000, deadline_ns % 1000000000};
    atomic_fetch_add(&rank->sleepers, 1);
    long result = syscall(SYS_futex, &rank->state, FUTEX_WAIT_BITSET, seen, &deadline, NULL,
                          FUTEX_BITSET_MATCH_ANY);
    int is_late = result == -1 && errno == ETIMEDOUT;
    atomic_fetch_sub(&rank->sleepers, 1);
    return is_late;
}

OUTLINE int wait_longer(const Stage *stage, Rank *rank, uint32_t wanted) {
    int64_t began_ns = now_ns();
    int is_late = 0;
    for (;;) {
        uint32_t state = atomic_load_explicit(&rank->state, memory_order_acquire);
        if (has_reached(state, wanted)) return DONE;
        if (state & LEFT) return GONE;
        if (is_late) return LATE;
        if (now_ns() - began_ns < stage->spin_ns)
            for (int i = 0; i < PAUSES; i++) rest();
        else
            is_late = sleep_on(rank, state, began_ns + stage->timeout_ns);
    }
}

INLINE int wait_for(const Stage *stage, int rank, uint32_t wanted) {
    Rank *other = stage->ranks + rank;
    uint32_t state = atomic_load_explicit(&other->state, memory_order_acquire);
    return has_reached(state, wanted) ? DONE : wait_longer(stage, other, wanted);
}

static int wait_for_all(const Stage *stage) {
    for (int rank = 0; rank < stage->size; rank++) {
        int ended = rank == stage->rank ? DONE : wait_for(stage, rank, stage->state);
        if (ended != DONE) return ended;
    }
    return DONE;
}

/* ---- pieces -------------------------------------------------------------------------------- */

/* Where that rank's piece is while the state says that it is there. */
INLINE char *slot(const Stage *stage, int rank) {
    int64_t turn = stage->state / PIECE & 1;
    return stage->slots + (2 * rank + turn) * stage->slot_bytes;
}

/* The next piece is there; none of our own is shown where nobody reads it. */
static int show(Stage *stage, const void *piece, int64_t bytes) {
    int ended = wait_for_all(stage);
    if (ended != DONE) return ended;
    stage->state += PIECE;
    if (piece) memcpy(slot(stage, stage->rank), piece, bytes);
    Rank *own = stage->ranks + stage->rank;
    atomic_fetch_add(&own->state, PIECE);
    wake(own);
    return DONE;
}

/* In the order of ranks, in fp32: all of them come to the same bits. */
INLINE void add_up(const Stage *stage, char *own, int64_t count, int type) {
    const char *first = slot(stage, 0);
    int64_t stride = slot(stage, 1) - first;
    for (int64_t i = 0; i < count; i += LANES) {
        vf sum = load(at(first, i, type), count - i, type);
        for (int rank = 1; rank < stage->size; rank++)
            sum += load(at(first + rank * stride, i, type), count - i, type);
        store(at(own, i, type), sum, count - i, type);
    }
}

/* The sum over all ranks in place of our part. */
int32_t stage_sum(Stage *stage, char *x, int64_t count, int32_t type) {
    int64_t most = stage->slot_bytes / size_of(type);
    for (int64_t start = 0; start < count; start += most) {
        int64_t number = min64(most, count - start);
        char *own = at(x, start, type);
        int ended = show(stage, own, number * size_of(type));
        if (ended == DONE) ended = wait_for_all(stage);
        if (ended != DONE) return ended;
        if (type == F32) add_up(stage, own, number, F32);
        else if (type == BF16) add_up(stage, own, number, BF16);
        else add_up(stage, own, number, F16);
    }
    return DONE;
}

/* Bytes from `start` of one rank's rows, of `width` bytes each, into its columns of `out`. */
static void place(const Stage *stage, int rank, const char *piece, char *out, int64_t start,
                  int64_t bytes, int64_t width) {
    while (bytes) {
        int64_t row = start / width, column = start % width;
        int64_t part = min64(bytes, width - column);
        memcpy(out + (row * stage->size + rank) * width + column, piece, part);
        piece += part, start += part, bytes -= part;
    }
}

/* Rows of `width` bytes of every rank, side by side in rank 0's `out`. */
int32_t stage_gather(Stage *stage, const char *x, char *out, int64_t rows, int64_t width) {
    int64_t total = rows * width;
    if (stage->rank == 0) place(stage, 0, x, out, 0, total, width);
    for (int64_t start = 0; start < total; start += stage->slot_bytes) {
        int64_t bytes = min64(stage->slot_bytes, total - start);
        int ended = show(stage, stage->rank ? x + start : NULL, bytes);
        if (ended == DONE && stage->rank == 0) ended = wait_for_all(stage);
        if (ended != DONE) return ended;
        for (int rank = 1; rank < stage->size && stage->rank == 0; rank++)
            place(stage, rank, slot(stage, rank), out, start, bytes, width);
    }
    return DONE;
}

/* Some rank has left: whoever waits, or will wait, for what has not been shown waits no longer. */
void stage_leave(Stage *stage) {
    for (int rank = 0; rank < stage->size; rank++) {
        atomic_fetch_or(&stage->ranks[rank].state, LEFT);
        wake(stage->ranks + rank);
    }
}
