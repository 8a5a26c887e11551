/* A caching allocator for torch.cuda.memory.CUDAPluggableAllocator: segments from CUDA's virtual memory management.
 *
 * Each device has one reserved range of addresses. What PyTorch gives back stays mapped and is handed out again without a driver call,
 * split and joined at the granularity. free waits for the device's work, as cudaFree does, because that work may name the memory on any
 * stream (a replayed graph's memory is not its capture's stream's); so whatever is cached can be handed to any stream or unmapped at once,
 * and malloc never waits. The lock of a device is not held while it waits. A call that fails changes nothing and leaves its reason with its
 * thread alone. One loaded copy of this library is one pool. */
#include <sys/types.h>

#include "pool_device.h"

#define EXPORT __attribute__((visibility("default")))
#define HANDLE_BYTES ((size_t)32 << 20) /* the largest handle: what one live byte can keep from being unmapped */

static size_t largest_handle(const Pool* pool) {
    return pool->granularity > HANDLE_BYTES ? pool->granularity : HANDLE_BYTES / pool->granularity * pool->granularity;
}

/* Refuses at once what many handles would be made for in vain. */
static int check_free(const Pool* pool, size_t fresh) {
    size_t left, total;
    if (fresh <= largest_handle(pool)) return 0;
    if (check(driver.free_memory(&left, &total), "cuMemGetInfo")) return -1;
    if (fresh <= left) return 0;
    return fail(OUT_OF_MEMORY, "%zu bytes of new memory, but CUDA device %d has %zu free; free tensors or call torch.cuda.empty_cache()",
                fresh, pool->properties.location.id, left);
}

/* Creates, maps and opens memory for a hole. The handle is released at once: the mapping keeps its memory until it is unmapped. */
static int map_hole(Pool* pool, uint64_t at, size_t size) {
    size_t largest = largest_handle(pool);
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

/* Maps what is not mapped of [at, at + size), `fresh` bytes; all of it or nothing. */
static int back(Pool* pool, uint64_t at, size_t size, size_t fresh) {
    Ledger* ledger = &pool->ledger;
    int mode;
    size_t parts = size / pool->granularity; /* no more mappings than that */
    if (ledger_room(ledger, 2 * parts + 2, parts)) return fail(OUT_OF_MEMORY, "no host memory for the pool's ledger");
    if (enter(pool, &mode)) return -1;
    int failed = check_free(pool, fresh);
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
        } else if (fresh == 0 || back(pool, at, size, fresh) == 0) {
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
