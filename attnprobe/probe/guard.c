/* Allocations between guard pages: finds accesses outside a block, and says how far outside.
 *
 * Preloaded into the probing process. While armed, aligned allocations of any size and others from 1 KiB
 * on are served as
 *
 *   [gap, no access][zone .. block start][block][zone, shorter than the alignment][gap, no access]
 *
 * so that the first byte behind most blocks is in the gap. The gap turns a read or a write into a signal;
 * the handler notes it, opens that page and lets the kernel go on. The zones hold a known byte: they show
 * writes when they are compared, and reads by what the kernel makes of them. Whatever is not armed passes
 * to the real allocator.
 *
 * Memory around other tensors (the inputs) is laid out by Python, which registers it as a region.
 * guard.py is the other half. C11, Linux, glibc or musl; nothing of torch is needed.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#define VERSION 1
#define SMALLEST 1024        /* unaligned blocks below this belong to the interpreter, mostly */
#define RESERVE (1ull << 36) /* address space, not memory */
#define RESERVE_LEAST (1ull << 26)
#define GAP_PAGES 16         /* a row further out is still in the gap */
#define SLOTS 16384          /* each costs two mappings, of the 65530 a process may have */
#define CLASSES 256
#define KEPT_MOST (64ull << 20) /* bytes of free slots that keep their pages */
#define REGIONS 32
#define OPENED 1024
#define RECORDS 64

/* One place for a block; its pages stay accessible when it is free, so that reuse costs no system call. */
struct slot {
    char *begin, *end;   /* the accessible pages */
    char *start;         /* the block of the present or last tenant */
    size_t size;
    uint32_t next_free;  /* slot 0 is a stand-in that ends the list */
    uint16_t class;
    unsigned char zone;
    bool kept;           /* free, and its pages still count against KEPT_MOST */
    atomic_bool live;
};

struct region {
    char *base, *limit;  /* all of it, gaps included */
    char *start, *end;   /* the tensor's storage */
};

enum access { UNKNOWN, READ, WRITE };

/* What Python fetches. `region` is -1 for a block of `size` bytes. */
struct record {
    int32_t region, access;
    uint64_t size;
    int64_t offset;      /* from the end if not negative, from the start if negative */
    uint64_t count;      /* bytes changed; for reads, pages touched */
};

struct opened {
    char *page;
    struct record about;
    char *start, *end;
    unsigned char zone;
};

static struct slot slots[SLOTS];
static atomic_uint slots_used;
static uint32_t free_list[CLASSES];
static char *range_low, *range_high, *range_top; /* reserved; used up to range_top */
static uint64_t kept_bytes;
static size_t page_size = 4096;
static atomic_bool armed;
static atomic_uchar fill_byte, zone_byte;
static struct region regions[REGIONS];

static struct record records[RECORDS];
static size_t records_used;
static uint64_t records_lost;
static struct opened opened[OPENED];
static size_t opened_used;
static struct sigaction previous[2];

/* Two locks, taken in this order: the handler takes the second, and must never wait for one that its own
 * thread holds. Who holds that one touches no page that is closed. */
static atomic_flag slot_lock = ATOMIC_FLAG_INIT, record_lock = ATOMIC_FLAG_INIT;

static void lock(atomic_flag *flag) {
    while (atomic_flag_test_and_set_explicit(flag, memory_order_acquire)) sched_yield();
}

static void unlock(atomic_flag *flag) { atomic_flag_clear_explicit(flag, memory_order_release); }

/* ---- the real allocator ------------------------------------------------------------------------ */

static struct {
    void *(*malloc)(size_t);
    void *(*calloc)(size_t, size_t);
    void *(*realloc)(void *, size_t);
    void (*free)(void *);
    int (*posix_memalign)(void **, size_t, size_t);
    void *(*aligned_alloc)(size_t, size_t);
    void *(*memalign)(size_t, size_t);
    size_t (*malloc_usable_size)(void *);
} real;

/* dlsym itself may allocate while the real functions are looked up; that memory is never given back. */
static _Alignas(16) char early[16384];
static size_t early_used;
static bool looking_up;

static bool is_early(const void *p) { return (char *)p >= early && (char *)p < early + sizeof early; }

static void *early_block(size_t size) {
    size_t from = early_used;
    if (size > sizeof early - from) return NULL;
    early_used = from + ((size + 15) & ~(size_t)15);
    if (early_used > sizeof early) early_used = sizeof early;
    return early + from; /* zero: nothing here is used twice */
}

static void look_up(void) {
    looking_up = true;
    *(void **)&real.calloc = dlsym(RTLD_NEXT, "calloc");
    *(void **)&real.realloc = dlsym(RTLD_NEXT, "realloc");
    *(void **)&real.free = dlsym(RTLD_NEXT, "free");
    *(void **)&real.posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    *(void **)&real.aligned_alloc = dlsym(RTLD_NEXT, "aligned_alloc");
    *(void **)&real.memalign = dlsym(RTLD_NEXT, "memalign");
    *(void **)&real.malloc_usable_size = dlsym(RTLD_NEXT, "malloc_usable_size");
    *(void **)&real.malloc = dlsym(RTLD_NEXT, "malloc");
    looking_up = false;
}

/* Whether the real functions are there; the first allocation comes before any constructor. */
static inline bool ready(void) {
    if (__builtin_expect(real.malloc != NULL, 1)) return true;
    if (!looking_up) look_up();
    return real.malloc != NULL;
}

/* ---- what was seen ------------------------------------------------------------------------------ */

/* Return how far an address outside a block is from it: -1 is the last byte before, 0 the first behind. */
static int64_t outside(const char *at, const char *start, const char *end) {
    return at < start ? at - start : at - end;
}

/* Keep one record for each block size or region, side and kind of access, with the nearest offset. */
static void note(struct record seen) {
    lock(&record_lock);
    struct record *same = NULL;
    for (size_t i = 0; i < records_used && !same; i++) {
        struct record *r = &records[i];
        if (r->region == seen.region && r->size == seen.size && r->access == seen.access &&
            (r->offset < 0) == (seen.offset < 0))
            same = r;
    }
    if (same) {
        same->count += seen.count;
        if (llabs(seen.offset) < llabs(same->offset)) same->offset = seen.offset;
    } else if (records_used < RECORDS) {
        records[records_used++] = seen;
    } else {
        records_lost++;
    }
    unlock(&record_lock);
}

static bool holds(const char *from, const char *to, unsigned char byte) {
    return from == to || ((unsigned char)*from == byte && !memcmp(from, from + 1, (size_t)(to - from) - 1));
}

/* Whether [from, to) does not hold `byte` any more; if so, say in `about` what was written there. */
static bool changed(const char *from, const char *to, unsigned char byte, const char *start, const char *end,
                    struct record *about) {
    if (holds(from, to, byte)) return false;
    about->access = WRITE;
    about->count = 0;
    for (const char *at = from; at < to; at++)
        if ((unsigned char)*at != byte && !about->count++) about->offset = outside(at, start, end);
    return true;
}

/* Compare the zones of a block; what has been noted is not noted again. Needs slot_lock. */
static void check_slot(struct slot *s) {
    char *start = s->start, *end = start + s->size;
    char *zones[2][2] = {{s->begin, start}, {end, s->end}};
    for (int i = 0; i < 2; i++) {
        struct record about = {.region = -1, .size = s->size};
        char *from = zones[i][0], *to = zones[i][1];
        if (!changed(from, to, s->zone, start, end, &about)) continue;
        note(about);
        memset(from, s->zone, (size_t)(to - from));
    }
}

/* Close the pages that accesses outside the block at `start`, or any at all, opened; note what was written
 * into them. A slot's next tenant finds its gaps closed. */
static void close_pages(const char *start) {
    size_t i = 0;
    for (;;) {
        lock(&record_lock);
        while (i < opened_used && start && opened[i].start != start) i++;
        if (i >= opened_used) break;
        struct opened o = opened[i];
        opened[i] = opened[--opened_used];
        bool written = changed(o.page, o.page + page_size, o.zone, o.start, o.end, &o.about);
        madvise(o.page, page_size, MADV_DONTNEED);
        mprotect(o.page, page_size, PROT_NONE);
        unlock(&record_lock);
        if (written) note(o.about);
    }
    unlock(&record_lock);
}

/* ---- guarded blocks ----------------------------------------------------------------------------- */

static inline bool is_guarded(const void *p) { return (char *)p >= range_low && (char *)p < range_high; }

/* Return the slot that begins last at or before an address. Slots lie in the order of their numbers. */
static struct slot *slot_at(const char *at) {
    size_t low = 0, high = atomic_load_explicit(&slots_used, memory_order_acquire);
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (slots[middle].begin <= at) low = middle;
        else high = middle;
    }
    return &slots[low];
}

/* Exact up to 64 pages, then eight sizes to each doubling: a long scan reuses what it has. */
static unsigned size_class(size_t *pages) {
    if (*pages <= 64) return (unsigned)*pages;
    unsigned shift = 60 - (unsigned)__builtin_clzll(*pages - 1);
    size_t steps = ((*pages - 1) >> shift) + 1;
    *pages = steps << shift;
    return 64 + (shift - 3) * 8 + (unsigned)(steps - 8);
}

static uint32_t new_slot(size_t pages, unsigned class) {
    unsigned used = atomic_load_explicit(&slots_used, memory_order_relaxed);
    size_t bytes = pages * page_size, gap = GAP_PAGES * page_size;
    if (used == SLOTS || bytes + gap > (size_t)(range_high - range_top)) return 0;
    if (mprotect(range_top, bytes, PROT_READ | PROT_WRITE)) return 0;
    struct slot *s = &slots[used];
    s->begin = range_top;
    s->end = range_top + bytes;
    s->class = (uint16_t)class;
    range_top = s->end + gap;
    atomic_store_explicit(&slots_used, used + 1, memory_order_release);
    return used;
}

/* Return a block of `size` > 0 bytes that hold `byte`; NULL where there is no place for it. */
static void *guarded(size_t size, size_t alignment, unsigned char byte) {
    if (size > (size_t)(range_high - range_low) / 2) return NULL;
    size_t pages = (size + page_size - 1) / page_size;
    unsigned class = size_class(&pages);
    lock(&slot_lock);
    uint32_t number = free_list[class];
    if (number) {
        free_list[class] = slots[number].next_free;
        if (slots[number].kept) kept_bytes -= pages * page_size;
    } else {
        number = new_slot(pages, class);
    }
    unlock(&slot_lock);
    if (!number) return NULL;
    struct slot *s = &slots[number];
    s->zone = atomic_load_explicit(&zone_byte, memory_order_relaxed);
    s->size = size;
    s->start = (char *)(((uintptr_t)s->end - size) & ~(uintptr_t)(alignment - 1));
    memset(s->begin, s->zone, (size_t)(s->start - s->begin));
    memset(s->start, byte, size);
    memset(s->start + size, s->zone, (size_t)(s->end - s->start) - size);
    atomic_store_explicit(&s->live, true, memory_order_release);
    return s->start;
}

/* Return the slot of a block; what is no block ends the process, as it does in the real allocator. */
static struct slot *tenant(void *block) {
    struct slot *s = slot_at(block);
    if (!atomic_load_explicit(&s->live, memory_order_acquire) || s->start != block) abort();
    return s;
}

static void release(void *block) {
    struct slot *s = tenant(block);
    size_t bytes = (size_t)(s->end - s->begin);
    close_pages(s->start);
    lock(&slot_lock);
    check_slot(s);
    atomic_store_explicit(&s->live, false, memory_order_release);
    s->kept = kept_bytes + bytes <= KEPT_MOST;
    if (s->kept) kept_bytes += bytes;
    else madvise(s->begin, bytes, MADV_DONTNEED);
    s->next_free = free_list[s->class];
    free_list[s->class] = (uint32_t)(s - slots);
    unlock(&slot_lock);
}

/* ---- in place of the allocator's functions ------------------------------------------------------ */

static inline bool wanted(size_t size) {
    return __builtin_expect(atomic_load_explicit(&armed, memory_order_relaxed), 0) && size >= SMALLEST;
}

static inline bool wanted_aligned(size_t size, size_t alignment) {
    return __builtin_expect(atomic_load_explicit(&armed, memory_order_relaxed), 0) && size &&
           alignment && !(alignment & (alignment - 1)) && alignment <= page_size;
}

void *malloc(size_t size) {
    if (!ready()) return early_block(size);
    void *block = wanted(size) ? guarded(size, 16, fill_byte) : NULL;
    return block ? block : real.malloc(size);
}

void *calloc(size_t count, size_t each) {
    if (!ready()) return each && count > sizeof early / each ? NULL : early_block(count * each);
    size_t size;
    bool fits = !__builtin_mul_overflow(count, each, &size);
    void *block = fits && wanted(size) ? guarded(size, 16, 0) : NULL;
    return block ? block : real.calloc(count, each);
}

void free(void *block) {
    if (!block || is_early(block)) return;
    if (is_guarded(block)) release(block);
    else if (ready()) real.free(block);
}

void *realloc(void *block, size_t size) {
    if (!block) return malloc(size);
    if (!is_guarded(block) && !is_early(block)) return real.realloc(block, size);
    if (!size) {
        free(block);
        return NULL;
    }
    size_t held = is_guarded(block) ? tenant(block)->size : (size_t)(early + sizeof early - (char *)block);
    void *moved = malloc(size);
    if (!moved) return NULL;
    memcpy(moved, block, held < size ? held : size);
    free(block);
    return moved;
}

int posix_memalign(void **into, size_t alignment, size_t size) {
    if (!ready()) return ENOMEM;
    bool takes = wanted_aligned(size, alignment) && alignment >= sizeof(void *);
    void *block = takes ? guarded(size, alignment, fill_byte) : NULL;
    if (!block) return real.posix_memalign(into, alignment, size);
    *into = block;
    return 0;
}

void *aligned_alloc(size_t alignment, size_t size) {
    if (!ready()) return NULL;
    void *block = wanted_aligned(size, alignment) ? guarded(size, alignment, fill_byte) : NULL;
    return block ? block : real.aligned_alloc(alignment, size);
}

void *memalign(size_t alignment, size_t size) {
    if (!ready()) return NULL;
    void *block = wanted_aligned(size, alignment) ? guarded(size, alignment, fill_byte) : NULL;
    return block ? block : real.memalign(alignment, size);
}

size_t malloc_usable_size(void *block) {
    if (!block || is_early(block) || !ready()) return 0;
    return is_guarded(block) ? tenant(block)->size : real.malloc_usable_size(block);
}

/* ---- faults ------------------------------------------------------------------------------------- */

/* Fill in whose gap an address is in; false where it is in nobody's. */
static bool whose(const char *at, struct opened *found) {
    for (int i = 0; i < REGIONS; i++) {
        struct region *r = &regions[i];
        if (at < r->base || at >= r->limit) continue;
        found->start = r->start;
        found->end = r->end;
        found->about = (struct record){.region = i, .size = (uint64_t)(r->end - r->start)};
        found->about.offset = outside(at, r->start, r->end);
        return at < r->start || at >= r->end;
    }
    if (!is_guarded(at)) return false;
    struct slot *before = slot_at(at), *after = before + 1, *s = before;
    if (at < before->end) return false;
    bool neighbour = after < slots + atomic_load_explicit(&slots_used, memory_order_acquire);
    if (neighbour && after->live &&
        (!before->live || after->start - at < at - (before->start + before->size)))
        s = after;
    if (s == slots) return false;
    found->start = s->start;
    found->end = s->start + s->size;
    found->about = (struct record){.region = -1, .size = s->size};
    found->about.offset = outside(at, found->start, found->end);
    return true;
}

static enum access access_of(void *context) {
#if defined(__x86_64__) && defined(REG_ERR)
    return ((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] & 2 ? WRITE : READ;
#else
    (void)context;
    return UNKNOWN;
#endif
}

/* Note an access to a gap and open the page; false where the address is no gap of ours. */
static bool let_through(char *at, void *context) {
    struct opened one = {.page = (char *)((uintptr_t)at & ~(uintptr_t)(page_size - 1))};
    if (!whose(at, &one)) return false;
    one.zone = atomic_load_explicit(&zone_byte, memory_order_relaxed);
    bool through = true, first = true;
    lock(&record_lock);
    for (size_t i = 0; i < opened_used && first; i++) first = opened[i].page != one.page;
    if (first) { /* otherwise another thread came here a moment earlier */
        through = opened_used < OPENED && !mprotect(one.page, page_size, PROT_READ | PROT_WRITE);
        if (through) {
            memset(one.page, one.zone, page_size);
            opened[opened_used++] = one;
        }
    }
    unlock(&record_lock);
    one.about.access = access_of(context);
    /* The bytes that a write changes are counted when the page is closed. */
    one.about.count = one.about.access == WRITE ? 0 : 1;
    if (through && first) note(one.about);
    return through;
}

static void on_fault(int number, siginfo_t *info, void *context) {
    int saved = errno;
    if (info->si_code <= 0 || !let_through(info->si_addr, context)) {
        sigaction(number, &previous[number == SIGBUS], NULL);
        /* A fault comes again by itself when we return; a signal that somebody sent does not. */
        if (info->si_code <= 0) raise(number);
    }
    errno = saved;
}

static void watch(int number) {
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK}, now;
    sigemptyset(&ours.sa_mask);
    if (sigaction(number, NULL, &now)) return;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault) return;
    previous[number == SIGBUS] = now;
    sigaction(number, &ours, NULL);
}

/* A kernel that faults with little stack left still gets its handler, on the thread that arms. */
static void borrow_stack(void) {
    static char stack[64 << 10];
    static bool taken;
    stack_t now, ours = {.ss_sp = stack, .ss_size = sizeof stack};
    if (taken || sigaltstack(NULL, &now) || !(now.ss_flags & SS_DISABLE)) return;
    taken = !sigaltstack(&ours, NULL);
}

/* ---- for Python --------------------------------------------------------------------------------- */

int attnprobe_guard_version(void) { return VERSION; }

/* Register memory that Python laid out; a null base takes a region away. */
int attnprobe_guard_region(int number, char *base, char *limit, char *start, char *end) {
    if (number < 0 || number >= REGIONS) return -1;
    regions[number] = (struct region){base, base ? limit : NULL, start, end};
    return 0;
}

/* Serve allocations from guarded blocks that hold `fill`, in zones of `zone`; -1: only regions are. */
int attnprobe_guard_arm(int fill, int zone) {
    if (!range_low) {
        size_t bytes = RESERVE * 2;
        void *at = MAP_FAILED;
        while (at == MAP_FAILED && (bytes /= 2) >= RESERVE_LEAST)
            at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at != MAP_FAILED) {
            slots[0].begin = slots[0].end = slots[0].start = at;
            atomic_store(&slots_used, 1);
            range_top = (char *)at + GAP_PAGES * page_size;
            range_high = (char *)at + bytes;
            range_low = at;
        }
    }
    borrow_stack();
    watch(SIGSEGV);
    watch(SIGBUS);
    fill_byte = (unsigned char)fill;
    zone_byte = (unsigned char)zone;
    atomic_store(&armed, range_low != NULL);
    return range_low ? 0 : -1;
}

void attnprobe_guard_disarm(void) { atomic_store(&armed, false); }

/* Compare the zones of all live blocks. */
void attnprobe_guard_check(void) {
    lock(&slot_lock);
    unsigned used = atomic_load(&slots_used);
    for (unsigned i = 1; i < used; i++)
        if (atomic_load_explicit(&slots[i].live, memory_order_acquire)) check_slot(&slots[i]);
    unlock(&slot_lock);
}

/* Close all pages that accesses opened. */
void attnprobe_guard_reset(void) { close_pages(NULL); }

/* Move up to `most` records out; returns how many, and by `lost` how many accesses found no room. */
int attnprobe_guard_take(struct record *out, int most, uint64_t *lost) {
    lock(&record_lock);
    int taken = records_used < (size_t)most ? (int)records_used : most;
    memcpy(out, records, (size_t)taken * sizeof *out);
    *lost = records_lost + (records_used - (size_t)taken);
    records_used = 0;
    records_lost = 0;
    unlock(&record_lock);
    return taken;
}

/* How many blocks are live, for tests. */
int attnprobe_guard_live(void) {
    int live = 0;
    for (unsigned i = 1; i < atomic_load(&slots_used); i++) live += slots[i].live;
    return live;
}

static void before_fork(void) {
    lock(&slot_lock);
    lock(&record_lock);
}

static void after_fork(void) {
    unlock(&record_lock);
    unlock(&slot_lock);
}

__attribute__((constructor)) static void set_up(void) {
    long size = sysconf(_SC_PAGESIZE);
    if (size > 0) page_size = (size_t)size;
    ready();
    pthread_atfork(before_fork, after_fork, after_fork);
}
