/* One device's pool: its state, and how it is found and opened. */
#ifndef DEPTHFX_POOL_DEVICE_H
#define DEPTHFX_POOL_DEVICE_H

#include <pthread.h>

#include "pool_error.h"
#include "segment_ledger.h"

#define MAX_DEVICES 64
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

#endif
