/* A strict stand-in for libcuda.so.1 over mmap: two devices, CUDA's documented rules, counted calls, failures on demand.
 * A broken rule returns CUDA_ERROR_INVALID_VALUE; memory unmapped while its device is busy is counted as a violation. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRANULARITY ((size_t)2 << 20)
#define DEVICES 2
#define ROOM 4096
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201 };

typedef struct { int type; int id; } Location;
typedef struct { Location location; int flags; } Access;
typedef struct { int type, handle_types; Location location; void* meta; unsigned char flags[8]; } Properties;
typedef struct { const char* name; long count, fail_at; int code; } Call;
typedef struct { unsigned long long id; size_t size; int device, released, mapped; } Handle;
typedef struct { uint64_t at; size_t size; int device; unsigned long long handle; } Place;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Call calls[64];
static Handle handles[ROOM];
static Place ranges[ROOM], mappings[ROOM];
static int num_calls, num_handles, num_ranges, num_mappings, retained[DEVICES], busy[DEVICES], violations, has_vmm = 1;
static unsigned long long next_handle = 1;
static volatile int hold_waits, num_held;
static size_t used[DEVICES], memory[DEVICES] = {(size_t)1 << 30, (size_t)1 << 30};
static _Thread_local int stack[8], depth;

static Call* call_named(const char* name) {
    for (int i = 0; i < num_calls; i++)
        if (strcmp(calls[i].name, name) == 0) return calls + i;
    calls[num_calls] = (Call){.name = strdup(name)};
    return calls + num_calls++;
}

static int entered(const char* name) {
    Call* call = call_named(name);
    call->count++;
    if (call->fail_at != 0 && call->count == call->fail_at) return call->code;
    return strncmp(name, "cuMem", 5) == 0 && depth == 0 ? INVALID_CONTEXT : SUCCESS;
}

#define BEGIN(name)                  \
    pthread_mutex_lock(&lock);       \
    int result = entered(name);      \
    if (result == SUCCESS) {
#define END                          \
    }                                \
    pthread_mutex_unlock(&lock);     \
    return result;
#define REQUIRE(condition) if (!(condition)) result = INVALID_VALUE; else

/* For the tests. */
long fake_count(const char* name) { pthread_mutex_lock(&lock); long n = call_named(name)->count; pthread_mutex_unlock(&lock); return n; }
long fake_count_all(void) { long n = 0; for (int i = 0; i < num_calls; i++) n += calls[i].count; return n; }
void fake_fail(const char* name, long nth, int code) { Call* call = call_named(name); call->fail_at = nth == 0 ? 0 : call->count + nth; call->code = code; }
void fake_set_memory(int device, size_t bytes) { memory[device] = bytes; }
void fake_set_busy(int device, int value) { busy[device] = value; }
void fake_set_vmm(int value) { has_vmm = value; }
void fake_hold_waits(int value) { hold_waits = value; }
int fake_num_held(void) { return num_held; }
size_t fake_used(int device) { return used[device]; }
int fake_left(void) { return num_handles + num_ranges + num_mappings + retained[0] + retained[1]; }
int fake_num_mappings(void) { return num_mappings; }
int fake_violations(void) { return violations; }

int cuInit(unsigned flags) { BEGIN("cuInit") REQUIRE(flags == 0) {} END }
int cuDeviceGet(int* device, int index) { BEGIN("cuDeviceGet") REQUIRE(index >= 0 && index < DEVICES) *device = 70 + index; END }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    BEGIN("cuDeviceGetAttribute") REQUIRE(device >= 70) *value = attribute == 102 ? has_vmm : 1; END
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { BEGIN("cuDeviceTotalMem_v2") *bytes = memory[device - 70]; END }
int cuMemGetInfo_v2(size_t* left, size_t* total) {
    BEGIN("cuMemGetInfo_v2")
    *total = memory[stack[depth - 1]];
    *left = *total - used[stack[depth - 1]];
    END
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
    BEGIN("cuDevicePrimaryCtxRetain") retained[device - 70]++; *context = (void*)(intptr_t)(900 + device - 70); END
}
int cuDevicePrimaryCtxRelease_v2(int device) { BEGIN("cuDevicePrimaryCtxRelease_v2") REQUIRE(retained[device - 70] > 0) retained[device - 70]--; END }
int cuCtxPushCurrent_v2(void* context) {
    BEGIN("cuCtxPushCurrent_v2")
    int device = (int)(intptr_t)context - 900;
    REQUIRE(device >= 0 && device < DEVICES && retained[device] > 0 && depth < 8) stack[depth++] = device;
    END
}
int cuCtxPopCurrent_v2(void** context) { BEGIN("cuCtxPopCurrent_v2") REQUIRE(depth > 0) { depth--; *context = NULL; } END }
int cuCtxSynchronize(void) {
    if (hold_waits) {
        __atomic_add_fetch(&num_held, 1, __ATOMIC_SEQ_CST);
        while (hold_waits) usleep(100);
        __atomic_sub_fetch(&num_held, 1, __ATOMIC_SEQ_CST);
    }
    BEGIN("cuCtxSynchronize") REQUIRE(depth > 0) busy[stack[depth - 1]] = 0; END
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
    static _Thread_local int current;
    int before = current;
    current = *mode;
    *mode = before;
    return SUCCESS;
}
int cuMemGetAllocationGranularity(size_t* bytes, const Properties* properties, int option) {
    (void)option;
    *bytes = GRANULARITY;
    return properties->type == 1 ? SUCCESS : INVALID_VALUE;
}

int cuMemAddressReserve(uint64_t* at, size_t size, size_t alignment, uint64_t wanted, unsigned long long flags) {
    BEGIN("cuMemAddressReserve")
    REQUIRE(size != 0 && size % GRANULARITY == 0 && alignment == 0 && wanted == 0 && flags == 0) {
        char* raw = mmap(NULL, size + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (raw == MAP_FAILED) result = OUT_OF_MEMORY;
        else {
            *at = ((uint64_t)raw + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
            munmap(raw, *at - (uint64_t)raw);
            munmap((char*)*at + size, (uint64_t)raw + GRANULARITY - *at);
            ranges[num_ranges++] = (Place){.at = *at, .size = size};
        }
    }
    END
}
int cuMemAddressFree(uint64_t at, size_t size) {
    BEGIN("cuMemAddressFree")
    int found = -1;
    for (int i = 0; i < num_ranges; i++) found = ranges[i].at == at && ranges[i].size == size ? i : found;
    for (int i = 0; i < num_mappings; i++) found = mappings[i].at >= at && mappings[i].at < at + size ? -1 : found;
    REQUIRE(found >= 0) {
        munmap((void*)at, size);
        ranges[found] = ranges[--num_ranges];
    }
    END
}

static void settle_handle(int i) {
    if (!handles[i].released || handles[i].mapped) return;
    used[handles[i].device] -= handles[i].size;
    handles[i] = handles[--num_handles];
}
static int handle_index(unsigned long long id) {
    for (int i = 0; i < num_handles; i++)
        if (handles[i].id == id) return i;
    return -1;
}

int cuMemCreate(unsigned long long* handle, size_t size, const Properties* properties, unsigned long long flags) {
    BEGIN("cuMemCreate")
    int device = properties->location.id;
    REQUIRE(size != 0 && size % GRANULARITY == 0 && flags == 0 && device == stack[depth - 1] && properties->flags[1] == 1) {
        if (used[device] + size > memory[device]) result = OUT_OF_MEMORY;
        else {
            used[device] += size;
            *handle = next_handle++;
            handles[num_handles++] = (Handle){.id = *handle, .size = size, .device = device};
        }
    }
    END
}
int cuMemRelease(unsigned long long handle) {
    BEGIN("cuMemRelease")
    int i = handle_index(handle);
    REQUIRE(i >= 0 && !handles[i].released) {
        handles[i].released = 1;
        settle_handle(i);
    }
    END
}
int cuMemMap(uint64_t at, size_t size, size_t offset, unsigned long long handle, unsigned long long flags) {
    BEGIN("cuMemMap")
    int index = handle_index(handle), inside = 0, overlaps = 0;
    for (int i = 0; i < num_ranges; i++) inside |= ranges[i].at <= at && at + size <= ranges[i].at + ranges[i].size;
    for (int i = 0; i < num_mappings; i++) overlaps |= mappings[i].at < at + size && at < mappings[i].at + mappings[i].size;
    REQUIRE(inside && !overlaps && index >= 0 && !handles[index].released && handles[index].size == size && offset == 0 && flags == 0) {
        handles[index].mapped++;
        mappings[num_mappings++] = (Place){.at = at, .size = size, .device = handles[index].device, .handle = handle};
    }
    END
}
int cuMemSetAccess(uint64_t at, size_t size, const Access* access, size_t count) {
    BEGIN("cuMemSetAccess")
    size_t covered = 0;
    for (int i = 0; i < num_mappings; i++) covered += mappings[i].at >= at && mappings[i].at + mappings[i].size <= at + size ? mappings[i].size : 0;
    REQUIRE(covered == size && count == 1 && access->flags == 3 && access->location.id == stack[depth - 1])
        mprotect((void*)at, size, PROT_READ | PROT_WRITE);
    END
}
int cuMemUnmap(uint64_t at, size_t size) {
    BEGIN("cuMemUnmap")
    int found = -1;
    for (int i = 0; i < num_mappings; i++) found = mappings[i].at == at && mappings[i].size == size ? i : found;
    REQUIRE(found >= 0) {
        violations += busy[mappings[found].device];
        mmap((void*)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        int index = handle_index(mappings[found].handle);
        mappings[found] = mappings[--num_mappings];
        handles[index].mapped--;
        settle_handle(index);
    }
    END
}

int cuGetErrorName(int code, const char** name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 1 ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OTHER";
    return SUCCESS;
}
int cuGetErrorString(int code, const char** text) {
    *text = code == 2 ? "out of memory" : "told by the driver";
    return SUCCESS;
}
