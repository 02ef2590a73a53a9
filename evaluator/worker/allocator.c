/* Large blocks of memory by exact size, the last one freed first: the history of a process decides nothing.

Preloaded into the zygote and so into both arms. The C library splits and joins free memory, so that what a process did
before decides whether a temporary lies in the cache: a reference against itself read up to 1.4 times too fast. Here a
block of at least LARGE bytes is kept whole under its size, and two processes that ask alike get alike, wherever they
come from. Each block starts some cache lines into its first page, by its number within its size.

Everything else is the C library's. `kontrast_release` gives all free blocks back to the kernel. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

enum {
    LARGE = 1 << 16,
    PAGE = 4096,
    LINE = 64,
    STRIDE = 37, /* lines between the starts of consecutive blocks of a size; odd, so that all 64 are used */
    BLOCKS = 1 << 14,
    SIZES = 1 << 10,
    PLACES = 4 * BLOCKS,
};

static const size_t KEPT = (size_t)1 << 30; /* free bytes above which all free blocks are given back */

struct size;

struct block {
    char *start; /* of the mapping; NULL for an unused entry */
    char *user;
    struct size *size;
    struct block *next;
};

struct size {
    size_t bytes;
    struct block *free;
    unsigned made;
};

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block blocks[BLOCKS];
static struct size sizes[SIZES];
static struct block *places[PLACES]; /* open addressing by the user's address */
static struct block *unused;
static unsigned block_count, size_count;
static size_t kept;

static struct block **place_of(const void *user) {
    unsigned at = (unsigned)((uintptr_t)user / LINE * 0x9E3779B97F4A7C15ull >> 48);
    while (places[at % PLACES] != NULL && places[at % PLACES]->user != user) at++;
    return &places[at % PLACES];
}

static struct size *size_of(size_t bytes) {
    for (unsigned i = 0; i < size_count; i++)
        if (sizes[i].bytes == bytes) return &sizes[i];
    if (size_count == SIZES) return NULL;
    sizes[size_count].bytes = bytes;
    return &sizes[size_count++];
}

static struct block *made(struct size *size) {
    if (unused == NULL && block_count == BLOCKS) return NULL;
    char *start = mmap(NULL, size->bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return NULL;
    struct block *block = unused;
    if (block != NULL) unused = block->next;
    else block = &blocks[block_count++];
    block->start = start;
    block->user = start + size->made++ * STRIDE % (PAGE / LINE) * LINE;
    block->size = size;
    *place_of(block->user) = block;
    return block;
}

/* A block of at least so many bytes, aligned to a cache line; NULL where there is none to be had. */
static void *take(size_t bytes) {
    if (bytes > SIZE_MAX / 2) return NULL;
    struct block *block = NULL;
    pthread_mutex_lock(&lock);
    struct size *size = size_of((bytes + PAGE - 1) / PAGE * PAGE);
    if (size != NULL && size->free != NULL) {
        block = size->free;
        size->free = block->next;
        kept -= size->bytes;
    } else if (size != NULL) {
        block = made(size);
    }
    pthread_mutex_unlock(&lock);
    return block != NULL ? block->user : NULL;
}

static void give_all_back(void) {
    for (unsigned i = 0; i < size_count; i++) {
        for (struct block *block = sizes[i].free, *next; block != NULL; block = next) {
            next = block->next;
            munmap(block->start, block->size->bytes + PAGE);
            *block = (struct block){.next = unused};
            unused = block;
        }
        sizes[i].free = NULL;
    }
    kept = 0;
    memset(places, 0, sizeof places);
    for (unsigned i = 0; i < block_count; i++)
        if (blocks[i].start != NULL) *place_of(blocks[i].user) = &blocks[i];
}

/* The size of a block of ours, 0 for any other pointer; with `give` the block becomes free. */
static size_t seen(void *user, int give) {
    if (user == NULL || (uintptr_t)user % LINE != 0) return 0;
    pthread_mutex_lock(&lock);
    struct block *block = *place_of(user);
    size_t bytes = block != NULL ? block->size->bytes : 0;
    if (block != NULL && give) {
        block->next = block->size->free;
        block->size->free = block;
        kept += bytes;
        if (kept > KEPT) give_all_back();
    }
    pthread_mutex_unlock(&lock);
    return bytes;
}

void kontrast_release(void) {
    pthread_mutex_lock(&lock);
    give_all_back();
    for (unsigned i = 0; i < size_count; i++) sizes[i].made = 0;
    pthread_mutex_unlock(&lock);
}

void *malloc(size_t bytes) {
    void *user = bytes >= LARGE ? take(bytes) : NULL;
    return user != NULL ? user : __libc_malloc(bytes);
}

void free(void *user) {
    int error = errno;
    if (seen(user, 1) == 0) __libc_free(user);
    errno = error;
}

void *calloc(size_t count, size_t each) {
    size_t bytes;
    void *user = NULL;
    if (!__builtin_mul_overflow(count, each, &bytes) && bytes >= LARGE) user = take(bytes);
    return user != NULL ? memset(user, 0, bytes) : __libc_calloc(count, each);
}

void *realloc(void *user, size_t bytes) {
    size_t had = seen(user, 0);
    if (had == 0 && bytes >= LARGE && user == NULL) return malloc(bytes);
    if (had == 0) return __libc_realloc(user, bytes);
    if (bytes >= LARGE && bytes <= had) return user;
    void *moved = bytes > 0 ? malloc(bytes) : NULL;
    if (moved == NULL && bytes > 0) return NULL;
    if (moved != NULL) memcpy(moved, user, had < bytes ? had : bytes);
    seen(user, 1);
    return moved;
}

void *memalign(size_t alignment, size_t bytes) {
    void *user = bytes >= LARGE && alignment <= LINE ? take(bytes) : NULL;
    return user != NULL ? user : __libc_memalign(alignment, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void **user, size_t alignment, size_t bytes) {
    if (alignment == 0 || alignment % sizeof(void *) != 0 || (alignment & (alignment - 1)) != 0) return EINVAL;
    void *found = memalign(alignment, bytes);
    if (found == NULL) return ENOMEM;
    *user = found;
    return 0;
}

size_t malloc_usable_size(void *user) {
    static size_t (*library)(void *);
    size_t had = seen(user, 0);
    if (had != 0) return had;
    if (library == NULL) library = (size_t(*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
    return user != NULL ? library(user) : 0;
}

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void begin(void) { pthread_atfork(before_fork, after_fork, after_fork); }
