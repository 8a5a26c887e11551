/* A caching allocator for torch.cuda.memory.CUDAPluggableAllocator: segments from CUDA's virtual memory management.
 *
 * Each device has one reserved range of addresses. What PyTorch gives back stays mapped and is handed out again without a driver call,
 * split and joined at the granularity. free waits for the device's work, as cudaFree does, because that work may name the memory on any
 * stream (a replayed graph's memory is not its capture's stream's); so whatever is cached can be handed to any stream or unmapped at once,
 * and malloc never waits. The lock of a device is not held while it waits. A call that fails changes nothing and leaves its reason with its
 * thread alone. One loaded copy of this library is one pool. */
#include <pthread.h>
#include <sys/types.h>

#include "pool_error.h"
#include "segment_ledger.h"

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 64
#define HANDLE_BYTES ((size_t)32 << 20) /* the largest handle: what one live byte can keep from being unmapped */
#define RANGE_PER_MEMORY 4              /* addresses reserved for each byte of the device: room for fragments */

typedef struct {
    int64_t granularity, range_bytes, capacity_bytes, mapped_bytes, peak_mapped_bytes, live_bytes, peak_live_bytes, asked_bytes, cached_bytes;
    int64_t pending_bytes, lost_bytes, num_live, num_mappings, num_mallocs, num_reuses, num_frees, num_refused_mallocs, num_refused_frees;
    int64_t num_failed_waits;
} PoolStats;

typedef struct {
    uint64_t at, size, asked, stream;
    int64_t state;
} SegmentRecord;

typedef struct {
    pthread_mutex_t lock;
    int is_open, is_closed; /* closed: hands out nothing, unmaps what comes back, ends when nothing is mapped */
    CUdevice device;
    CUcontext context;
    CUmemAllocationProp properties;
    CUdeviceptr base;
    size_t range, granularity, capacity, mapped, live;
    Ledger ledger;
    uint64_t num_freed;
    int num_waiting; /* threads that use the context without the lock */
    PoolStats counts;
} Pool;

static Pool pools[MAX_DEVICES] = {[0 ... MAX_DEVICES - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};
static int driver_loaded;
static pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER;

/* Driver calls of any thread run in the pool's context, and do not disturb a capture of that thread. */
static int enter(const Pool* pool, int* mode) {
    if (check(driver.context_push(pool->context), "cuCtxPushCurrent")) return -1;
    *mode = CAPTURE_MODE_RELAXED;
    driver.capture_mode(mode);
    return 0;
}

static void leave(int mode) {
    CUcontext popped;
    driver.capture_mode(&mode);
    driver.context_pop(&popped);
}

static int load(const char* library) {
    char why[400];
    pthread_mutex_lock(&driver_lock);
    int failed = 0;
    if (!driver_loaded) {
        failed = load_driver(&driver, library, why, sizeof why) ? fail(UNAVAILABLE, "%s", why) : check(driver.init(0), "cuInit");
        driver_loaded = !failed;
    }
    pthread_mutex_unlock(&driver_lock);
    return failed;
}

/* Room for handles that a NIC may read, where the device can; an old driver that does not know the question cannot. */
static void describe(Pool* pool, int index) {
    int rdma = 0;
    if (driver.device_attribute(&rdma, RDMA_WITH_VIRTUAL_MEMORY_SUPPORTED, pool->device) != CUDA_SUCCESS) rdma = 0;
    memset(&pool->properties, 0, sizeof pool->properties);
    pool->properties.type = ALLOCATION_PINNED;
    pool->properties.location = (CUmemLocation){LOCATION_DEVICE, index};
    pool->properties.flags.rdma_capable = rdma != 0;
}

static int reserve_range(Pool* pool) {
    size_t total = 0;
    int mode;
    if (check(driver.total_memory(&total, pool->device), "cuDeviceTotalMem")) return -1;
    if (pool->range == 0) pool->range = total * RANGE_PER_MEMORY;
    pool->range = (pool->range + pool->granularity - 1) / pool->granularity * pool->granularity;
    if (enter(pool, &mode)) return -1;
    int failed = check(driver.reserve(&pool->base, pool->range, 0, 0, 0), "cuMemAddressReserve");
    if (!failed && ledger_init(&pool->ledger, pool->base, pool->range)) {
        driver.address_free(pool->base, pool->range);
        failed = fail(OUT_OF_MEMORY, "no host memory for the pool's ledger");
    }
    leave(mode);
    return failed;
}

static int open_pool(Pool* pool, int index) {
    int supported = 0;
    if (pool->is_closed) return fail(BAD_STATE, "the pool of CUDA device %d is closed; make a new one", index);
    if (pool->is_open) return 0;
    if (load("libcuda.so.1") || check(driver.device_get(&pool->device, index), "cuDeviceGet")) return -1;
    if (check(driver.device_attribute(&supported, VIRTUAL_MEMORY_SUPPORTED, pool->device), "cuDeviceGetAttribute")) return -1;
    if (!supported) return fail(UNAVAILABLE, "CUDA device %d has no virtual memory management; use another device", index);
    describe(pool, index);
    if (check(driver.granularity(&pool->granularity, &pool->properties, GRANULARITY_MINIMUM), "cuMemGetAllocationGranularity")) return -1;
    if (check(driver.context_retain(&pool->context, pool->device), "cuDevicePrimaryCtxRetain")) return -1;
    if (reserve_range(pool)) {
        driver.context_release(pool->device);
        return -1;
    }
    pool->is_open = 1;
    return 0;
}

static Pool* pool_of(int device) {
    error = (PoolError){.kind = OK};
    if (device >= 0 && device < MAX_DEVICES) return pools + device;
    fail(BAD_REQUEST, "CUDA device %d is not allowed; give 0 to %d", device, MAX_DEVICES - 1);
    return NULL;
}

/* Creates, maps and opens memory for a hole. The handle is released at once: the mapping keeps its memory until it is unmapped. */
static int map_hole(Pool* pool, uint64_t at, size_t size) {
    size_t largest = pool->granularity > HANDLE_BYTES ? pool->granularity : HANDLE_BYTES / pool->granularity * pool->granularity;
    for (size_t done = 0; done < size;) {
        size_t part = size - done < largest ? size - done : largest;
        CUmemHandle handle;
        if (check(driver.create(&handle, part, &pool->properties, 0), "cuMemCreate")) return -1;
        int failed = check(driver.map(at + done, part, 0, handle, 0), "cuMemMap");
        if (!failed) add_mapping(&pool->ledger, at + done, part);
        CUresult released = driver.release(handle);
        if (failed || check(released, "cuMemRelease")) return -1;
        done += part;
    }
    CUmemAccessDesc access = {pool->properties.location, PROT_READWRITE};
    return check(driver.set_access(at, size, &access, 1), "cuMemSetAccess");
}

/* Ends the mappings of a call: they stay, or (failed) they are taken back; the thread's error is left as it is. */
static void end_fresh(Pool* pool, int failed) {
    Ledger* ledger = &pool->ledger;
    for (size_t i = ledger->num_mappings; i-- > 0;) {
        Mapping mapping = ledger->mappings[i];
        if (!mapping.fresh) continue;
        ledger->mappings[i].fresh = 0;
        if (failed && driver.unmap(mapping.at, mapping.size) == CUDA_SUCCESS) {
            drop_mapping(ledger, i);
            continue;
        }
        pool->mapped += mapping.size;
        if (failed) assign(ledger, mapping.at, mapping.size, LOST);
    }
}

/* Maps what is not mapped of [at, at + size); all of it or nothing. */
static int back(Pool* pool, uint64_t at, size_t size) {
    Ledger* ledger = &pool->ledger;
    int mode, failed = 0;
    size_t parts = size / pool->granularity; /* no more mappings than that */
    if (ledger_room(ledger, 2 * parts + 2, parts)) return fail(OUT_OF_MEMORY, "no host memory for the pool's ledger");
    if (enter(pool, &mode)) return -1;
    for (size_t i = segment_at(ledger, at); !failed && i < ledger->num_segments && ledger->segments[i].at < at + size; i++) {
        Segment segment = ledger->segments[i];
        uint64_t end = segment.at + segment.size < at + size ? segment.at + segment.size : at + size;
        if (segment.state == HOLE) failed = map_hole(pool, segment.at, end - segment.at);
    }
    end_fresh(pool, failed);
    leave(mode);
    if ((int64_t)pool->mapped > pool->counts.peak_mapped_bytes) pool->counts.peak_mapped_bytes = (int64_t)pool->mapped;
    return failed;
}

/* Unmaps each mapping that lies in cached or lost bytes alone; the bytes given to the driver. On a refusal it stops, with the error set. */
static size_t unmap_cached(Pool* pool) {
    Ledger* ledger = &pool->ledger;
    size_t released = 0;
    int mode;
    if (enter(pool, &mode)) return 0;
    for (size_t i = ledger->num_mappings; i-- > 0;) {
        Mapping mapping = ledger->mappings[i];
        Segment segment = ledger->segments[segment_at(ledger, mapping.at)];
        if ((segment.state != CACHED && segment.state != LOST) || segment.at + segment.size < mapping.at + mapping.size) continue;
        if (ledger_room(ledger, 2, 0)) {
            fail(OUT_OF_MEMORY, "no host memory for the pool's ledger");
            break;
        }
        if (check(driver.unmap(mapping.at, mapping.size), "cuMemUnmap")) break;
        drop_mapping(ledger, i);
        assign(ledger, mapping.at, mapping.size, HOLE);
        pool->mapped -= mapping.size;
        released += mapping.size;
    }
    leave(mode);
    return released;
}

/* A segment for `asked` bytes, or 0. Before it refuses for want of memory it unmaps what is cached in pieces and tries once more. */
static uint64_t take(Pool* pool, size_t asked, void* stream) {
    size_t size = asked > pool->range ? asked : (asked + pool->granularity - 1) / pool->granularity * pool->granularity;
    for (int attempt = 0; attempt < 2; attempt++) {
        size_t fresh = 0;
        uint64_t at = find_place(&pool->ledger, size, &fresh);
        if (at == 0) {
            fail(OVER_CAPACITY, "%zu bytes find no place in the pool's %zu bytes of addresses; free tensors", asked, pool->range);
        } else if (pool->capacity != 0 && fresh != 0 && pool->mapped + fresh > pool->capacity) {
            fail(OVER_CAPACITY, "%zu bytes (%zu of them new) exceed the %zu left of the pool's capacity of %zu bytes; free tensors or raise it",
                 size, fresh, pool->capacity > pool->mapped ? pool->capacity - pool->mapped : 0, pool->capacity);
        } else if (ledger_room(&pool->ledger, 2, 0)) {
            fail(OUT_OF_MEMORY, "no host memory for the pool's ledger");
        } else if (fresh == 0 || back(pool, at, size) == 0) {
            Segment* segment = assign(&pool->ledger, at, size, LIVE);
            segment->asked = asked;
            segment->stream = stream;
            pool->live += size;
            pool->counts.num_mallocs++;
            pool->counts.num_reuses += fresh == 0;
            if ((int64_t)pool->live > pool->counts.peak_live_bytes) pool->counts.peak_live_bytes = (int64_t)pool->live;
            error.kind = OK;
            return at;
        }
        if (error.kind == DRIVER_FAILED || attempt) return 0;
        PoolError refusal = error;
        size_t released = unmap_cached(pool);
        error = refusal;
        if (released == 0) return 0;
    }
    return 0;
}

/* The end of a closed pool of which nothing is mapped any more. Addresses that the driver does not take back are left to it. */
static int finish(Pool* pool) {
    int mode;
    if (!pool->is_open || !pool->is_closed || pool->mapped != 0 || pool->num_waiting != 0) return 0;
    if (enter(pool, &mode)) return -1;
    int failed = check(driver.address_free(pool->base, pool->range), "cuMemAddressFree");
    leave(mode);
    if (!failed) failed = check(driver.context_release(pool->device), "cuDevicePrimaryCtxRelease");
    ledger_drop(&pool->ledger);
    pool->is_open = 0;
    return failed;
}

/* Waits for the device without the lock, which the caller holds; then what was freed before is cached. */
static int settle(Pool* pool) {
    uint64_t mark = pool->num_freed;
    int mode;
    pool->num_waiting++;
    pthread_mutex_unlock(&pool->lock);
    int failed = enter(pool, &mode);
    if (!failed) {
        failed = check(driver.context_synchronize(), "cuCtxSynchronize");
        leave(mode);
    }
    pthread_mutex_lock(&pool->lock);
    pool->num_waiting--;
    pool->counts.num_failed_waits += failed != 0;
    for (size_t i = 0; !failed && i < pool->ledger.num_segments; i++) {
        Segment segment = pool->ledger.segments[i];
        if (segment.state != PENDING || segment.freed_at > mark) continue;
        i = (size_t)(assign(&pool->ledger, segment.at, segment.size, CACHED) - pool->ledger.segments);
    }
    return failed;
}

EXPORT const PoolError* depthfx_pool_last_error(void) { return &error; }

/* Loads the driver's library, once for all devices; NULL: the usual one. */
EXPORT int depthfx_pool_load(const char* library) {
    error = (PoolError){.kind = OK};
    return load(library == NULL ? "libcuda.so.1" : library);
}

/* Reserves the device's addresses; capacity 0: no bound, range 0: by the device's memory. */
EXPORT int depthfx_pool_open(int device, size_t capacity, size_t range) {
    Pool* pool = pool_of(device);
    if (pool == NULL) return -1;
    pthread_mutex_lock(&pool->lock);
    int failed = pool->is_open ? fail(BAD_STATE, "the pool of CUDA device %d is open already", device) : 0;
    if (!failed) {
        pool->capacity = capacity;
        pool->range = range;
        failed = open_pool(pool, device);
    }
    pthread_mutex_unlock(&pool->lock);
    return failed;
}

EXPORT void* depthfx_pool_malloc(ssize_t size, int device, void* stream) {
    Pool* pool = pool_of(device);
    uint64_t at = 0;
    if (pool == NULL) return NULL;
    pthread_mutex_lock(&pool->lock);
    if (size <= 0) fail(BAD_REQUEST, "a segment of %zd bytes is not allowed; ask for a positive number", size);
    else if (open_pool(pool, device) == 0) at = take(pool, (size_t)size, stream);
    pool->counts.num_refused_mallocs += at == 0;
    pthread_mutex_unlock(&pool->lock);
    return (void*)(uintptr_t)at;
}

EXPORT void depthfx_pool_free(void* address, ssize_t size, int device, void* stream) {
    Pool* pool = pool_of(device);
    uint64_t at = (uint64_t)(uintptr_t)address;
    (void)stream;
    if (pool == NULL) return;
    pthread_mutex_lock(&pool->lock);
    int inside = pool->is_open && at >= pool->base && at - pool->base < pool->range;
    Segment* segment = inside ? pool->ledger.segments + segment_at(&pool->ledger, at) : NULL;
    if (segment == NULL || segment->at != at || segment->state != LIVE) {
        fail(BAD_STATE, "%p is no live segment of CUDA device %d: freed twice, or not from this pool", address, device);
    } else if (size < 0 || (size_t)size != segment->asked) {
        fail(BAD_REQUEST, "%p was asked for with %zu bytes and cannot be freed with %zd; free it as it was asked for", address, segment->asked, size);
    } else {
        segment->state = PENDING;
        segment->freed_at = ++pool->num_freed;
        pool->live -= segment->size;
        pool->counts.num_frees++;
        settle(pool);
        if (pool->is_closed) {
            unmap_cached(pool);
            finish(pool);
        }
        pthread_mutex_unlock(&pool->lock);
        return;
    }
    pool->counts.num_refused_frees++;
    pthread_mutex_unlock(&pool->lock);
}

/* Waits for the device and unmaps what is cached; the bytes given back, or -1. With `close` nothing more is handed out, and the bytes that
 * are still mapped are the result. */
static int64_t give_back(int device, int close) {
    Pool* pool = pool_of(device);
    int64_t result = 0;
    if (pool == NULL) return -1;
    pthread_mutex_lock(&pool->lock);
    if (pool->is_open) {
        int failed = settle(pool);
        if (!failed && pool->is_open) {
            result = (int64_t)unmap_cached(pool);
            failed = error.kind != OK;
        }
        pool->is_closed |= close && !failed;
        if (close) result = (int64_t)pool->mapped;
        if (failed || finish(pool)) result = -1;
    }
    pool->is_closed |= close && !pool->is_open;
    pthread_mutex_unlock(&pool->lock);
    return result;
}

EXPORT int64_t depthfx_pool_trim(int device) { return give_back(device, 0); }

EXPORT int64_t depthfx_pool_close(int device) { return give_back(device, 1); }

EXPORT int depthfx_pool_stats(int device, PoolStats* out) {
    Pool* pool = pool_of(device);
    if (pool == NULL) return -1;
    pthread_mutex_lock(&pool->lock);
    int64_t bytes[NUM_STATES] = {0};
    *out = pool->counts;
    for (size_t i = 0; i < pool->ledger.num_segments; i++) {
        const Segment* segment = pool->ledger.segments + i;
        bytes[segment->state] += (int64_t)segment->size;
        out->asked_bytes += segment->state == LIVE ? (int64_t)segment->asked : 0;
        out->num_live += segment->state == LIVE;
    }
    out->granularity = (int64_t)pool->granularity;
    out->range_bytes = (int64_t)pool->range;
    out->capacity_bytes = (int64_t)pool->capacity;
    out->mapped_bytes = (int64_t)pool->mapped;
    out->live_bytes = bytes[LIVE];
    out->cached_bytes = bytes[CACHED];
    out->pending_bytes = bytes[PENDING];
    out->lost_bytes = bytes[LOST];
    out->num_mappings = (int64_t)pool->ledger.num_mappings;
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

/* Writes up to `room` segments that have memory, by address, and returns how many there are; -1 for a wrong device. */
EXPORT int64_t depthfx_pool_snapshot(int device, SegmentRecord* out, int64_t room) {
    Pool* pool = pool_of(device);
    int64_t count = 0;
    if (pool == NULL) return -1;
    pthread_mutex_lock(&pool->lock);
    for (size_t i = 0; i < pool->ledger.num_segments; i++) {
        Segment segment = pool->ledger.segments[i];
        if (segment.state == HOLE) continue;
        if (count < room) {
            out[count] = (SegmentRecord){segment.at, segment.size, segment.asked, (uint64_t)(uintptr_t)segment.stream, segment.state};
        }
        count++;
    }
    pthread_mutex_unlock(&pool->lock);
    return count;
}
