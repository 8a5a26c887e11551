/* A stand-in for the part of libcuda.so.1 that has streams: every stream is a thread that runs what was queued, in order and late.
 * Memory is the host's. Rules of CUDA that are broken return an error; bytes that a step finds changed are counted as violations. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };
enum { COPY, WAIT, RECORD, FILL, CHECK, BLOCK };

typedef struct { int alive; uint64_t recorded, completed; double at; } Event;
typedef struct Op { struct Op* next; int kind; char *target; const char* source; size_t size; int value; Event* event; uint64_t turn; } Op;
typedef struct { int alive, gated, blocked; Op *first, **last; uint64_t queued, ended; double clock; pthread_t thread; } Stream;
typedef struct { const char* name; long count, fail_at; int code; } Call;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Call calls[64];
static int num_calls, retained, num_streams, num_events, gate = 1;
static long violations, log_size, log_kinds[65536], log_sizes[65536];
static size_t queued_bytes, most_bytes;
static unsigned most_us;
static long catch_in;
static int caught;
static double pace = 1; /* milliseconds a byte, in the time that events tell */
static uint64_t seed = 1;
static Stream* default_stream;
static _Thread_local int depth, mode;

static int entered(const char* name) {
    int i = 0;
    while (i < num_calls && strcmp(calls[i].name, name)) i++;
    if (i == num_calls) calls[num_calls++] = (Call){.name = strdup(name)};
    return ++calls[i].count == calls[i].fail_at ? calls[i].code : SUCCESS;
}
#define BEGIN(name)              \
    pthread_mutex_lock(&lock);   \
    int result = entered(name);  \
    if (result == SUCCESS && depth == 0) result = INVALID_CONTEXT; \
    if (result == SUCCESS) {
#define END                      \
    }                            \
    pthread_mutex_unlock(&lock); \
    return result;
#define REQUIRE(condition) if (!(condition)) result = INVALID_HANDLE; else

static unsigned random_us(void) { /* under the lock */
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return most_us ? (unsigned)(seed % most_us) : 0;
}

static void pause_at_random(void) {
    pthread_mutex_lock(&lock);
    unsigned us = random_us();
    pthread_mutex_unlock(&lock);
    if (us) usleep(us);
}

static void run(Stream* stream, Op* op) { /* without the lock */
    pthread_mutex_lock(&lock);
    while (stream->gated && !gate && op->kind != WAIT) pthread_cond_wait(&changed, &lock);
    while (op->kind == WAIT && op->event->completed < op->turn) pthread_cond_wait(&changed, &lock);
    while (op->kind == BLOCK && stream->blocked) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    pause_at_random();
    for (size_t at = 0; at < op->size; at += 64) { /* bytes come one after another, as on a link */
        size_t part = op->size - at < 64 ? op->size - at : 64;
        if (op->kind == COPY) memcpy(op->target + at, op->source + at, part);
        if (op->kind == FILL) memset(op->target + at, op->value, part);
        for (size_t i = at; op->kind == CHECK && i < at + part; i++)
            if ((unsigned char)op->target[i] != op->value) { __atomic_add_fetch(&violations, 1, __ATOMIC_SEQ_CST); break; }
        if (at % 256 == 0 && most_us) pause_at_random();
    }
    pthread_mutex_lock(&lock);
    if (op->kind == RECORD && op->event->completed < op->turn) op->event->completed = op->turn, op->event->at = stream->clock;
    if (op->kind == COPY) queued_bytes -= op->size, stream->clock += pace * (double)op->size;
    stream->ended++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    free(op);
}

static void* serve(void* argument) {
    Stream* stream = argument;
    for (;;) {
        pthread_mutex_lock(&lock);
        while (stream->first == NULL && stream->alive) pthread_cond_wait(&changed, &lock);
        Op* op = stream->first;
        if (op != NULL && (stream->first = op->next) == NULL) stream->last = &stream->first;
        pthread_mutex_unlock(&lock);
        if (op == NULL) return NULL;
        run(stream, op);
    }
}

static Stream* make_stream(int gated) {
    Stream* stream = calloc(1, sizeof *stream);
    stream->alive = 1;
    stream->gated = gated;
    stream->last = &stream->first;
    pthread_create(&stream->thread, NULL, serve, stream);
    pthread_detach(stream->thread);
    return stream;
}

static void queue(Stream* stream, Op op) { /* under the lock */
    Op* made = malloc(sizeof *made);
    *made = op;
    made->next = NULL;
    *stream->last = made;
    stream->last = &made->next;
    stream->queued++;
    if (stream->gated && log_size < 65536) log_kinds[log_size] = op.kind, log_sizes[log_size++] = (long)op.size;
    pthread_cond_broadcast(&changed);
}

static Stream* stream_of(Stream* stream) { /* under the lock; 0 is the context's default stream */
    if (stream != NULL) return stream;
    if (default_stream == NULL) default_stream = make_stream(0);
    return default_stream;
}

/* For the tests. */
void fake_gate(int open) { pthread_mutex_lock(&lock); gate = open; pthread_cond_broadcast(&changed); pthread_mutex_unlock(&lock); }
void fake_delay(uint64_t first, unsigned us) {
    pthread_mutex_lock(&lock);
    seed = first * 0x9E3779B97F4A7C15u | 1;
    most_us = us;
    pthread_mutex_unlock(&lock);
}
void fake_pace(double ms) { pthread_mutex_lock(&lock); pace = ms; pthread_mutex_unlock(&lock); }
void fake_catch(long nth) {
    pthread_mutex_lock(&lock);
    catch_in = nth;
    caught = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}
int fake_caught(void) { pthread_mutex_lock(&lock); int now = caught; pthread_mutex_unlock(&lock); return now; }
void fake_fail(const char* name, long nth, int code) {
    pthread_mutex_lock(&lock);
    entered(name);
    for (int i = 0; i < num_calls; i++)
        if (strcmp(calls[i].name, name) == 0) calls[i].count--, calls[i].fail_at = nth ? calls[i].count + nth : 0, calls[i].code = code;
    pthread_mutex_unlock(&lock);
}
long fake_count(const char* name) {
    long found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_calls; i++) found += strcmp(calls[i].name, name) ? 0 : calls[i].count;
    pthread_mutex_unlock(&lock);
    return found;
}
long fake_violations(void) { return __atomic_load_n(&violations, __ATOMIC_SEQ_CST); }
size_t fake_most_bytes(void) { return most_bytes; }
int fake_left(void) { return retained + num_streams + num_events; }
long fake_log_size(void) { return log_size; }
long fake_log_kind(long i) { return log_kinds[i]; }
long fake_log_bytes(long i) { return log_sizes[i]; }
Stream* fake_stream(int is_default) {
    pthread_mutex_lock(&lock);
    Stream* made = is_default ? stream_of(NULL) : make_stream(0);
    pthread_mutex_unlock(&lock);
    return made;
}
Event* fake_event(void) { Event* event = calloc(1, sizeof *event); event->alive = 1; return event; }
static void queue_one(Stream* stream, Op op) { pthread_mutex_lock(&lock); queue(stream, op); pthread_mutex_unlock(&lock); }
void fake_fill(Stream* stream, char* target, size_t size, int value) {
    queue_one(stream, (Op){.kind = FILL, .target = target, .size = size, .value = value});
}
void fake_check(Stream* stream, char* target, size_t size, int value) {
    queue_one(stream, (Op){.kind = CHECK, .target = target, .size = size, .value = value});
}
void fake_block(Stream* stream) {
    pthread_mutex_lock(&lock);
    stream->blocked = 1;
    queue(stream, (Op){.kind = BLOCK});
    pthread_mutex_unlock(&lock);
}
void fake_unblock(Stream* stream) {
    pthread_mutex_lock(&lock);
    stream->blocked = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}
void fake_record(Stream* stream, Event* event) {
    pthread_mutex_lock(&lock);
    queue(stream, (Op){.kind = RECORD, .event = event, .turn = ++event->recorded});
    pthread_mutex_unlock(&lock);
}
int fake_ended(Event* event) {
    pthread_mutex_lock(&lock);
    int ended = event->completed >= event->recorded;
    pthread_mutex_unlock(&lock);
    return ended;
}
void fake_synchronize(Stream* stream) {
    pthread_mutex_lock(&lock);
    for (uint64_t until = stream->queued; stream->ended < until;) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

int cuInit(unsigned flags) {
    pthread_mutex_lock(&lock);
    int result = entered("cuInit");
    pthread_mutex_unlock(&lock);
    return result ? result : flags ? INVALID_VALUE : SUCCESS;
}
int cuDeviceGet(int* device, int index) { *device = 70 + index; return index < 2 ? SUCCESS : 101; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
    pthread_mutex_lock(&lock);
    int result = entered("cuDevicePrimaryCtxRetain");
    if (result == SUCCESS) retained++, *context = (void*)(intptr_t)(device + 900);
    pthread_mutex_unlock(&lock);
    return result;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    pthread_mutex_lock(&lock);
    retained--;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int cuCtxPushCurrent_v2(void* context) {
    pthread_mutex_lock(&lock);
    int result = entered("cuCtxPushCurrent_v2");
    pthread_mutex_unlock(&lock);
    if (result == SUCCESS) depth += context != NULL;
    return result;
}
int cuCtxPopCurrent_v2(void** context) { *context = NULL; return depth > 0 ? (depth--, SUCCESS) : INVALID_CONTEXT; }
int cuThreadExchangeStreamCaptureMode(int* exchanged) { int before = mode; mode = *exchanged; *exchanged = before; return SUCCESS; }

int cuStreamCreate(Stream** stream, unsigned flags) {
    BEGIN("cuStreamCreate") REQUIRE(flags == 1) { *stream = make_stream(1); num_streams++; } END
}
int cuStreamDestroy_v2(Stream* stream) {
    BEGIN("cuStreamDestroy_v2")
    REQUIRE(stream->alive) {
        violations += stream->ended != stream->queued;
        stream->alive = 0;
        num_streams--;
        pthread_cond_broadcast(&changed);
    }
    END
}
int cuStreamWaitEvent(Stream* stream, Event* event, unsigned flags) {
    BEGIN("cuStreamWaitEvent")
    REQUIRE(event->alive && flags == 0) queue(stream_of(stream), (Op){.kind = WAIT, .event = event, .turn = event->recorded});
    END
}
int cuStreamSynchronize(Stream* stream) {
    BEGIN("cuStreamSynchronize")
    for (uint64_t until = stream->queued; stream->ended < until;) pthread_cond_wait(&changed, &lock);
    END
}
int cuEventCreate(Event** event, unsigned flags) { BEGIN("cuEventCreate") REQUIRE(flags == 1) { *event = fake_event(); num_events++; } END }
int cuEventDestroy_v2(Event* event) { BEGIN("cuEventDestroy_v2") REQUIRE(event->alive) { event->alive = 0; num_events--; } END }
int cuEventRecord(Event* event, Stream* stream) {
    BEGIN("cuEventRecord")
    REQUIRE(event->alive && stream->alive) queue(stream, (Op){.kind = RECORD, .event = event, .turn = ++event->recorded});
    END
}
int cuEventSynchronize(Event* event) {
    BEGIN("cuEventSynchronize")
    REQUIRE(event->alive) for (uint64_t turn = event->recorded; event->completed < turn;) pthread_cond_wait(&changed, &lock);
    END
}
int cuEventQuery(Event* event) {
    BEGIN("cuEventQuery") REQUIRE(event->alive) result = event->completed < event->recorded ? 600 : SUCCESS; END
}
int cuEventElapsedTime(float* ms, Event* first, Event* last) {
    BEGIN("cuEventElapsedTime")
    REQUIRE(first->completed == first->recorded && last->completed == last->recorded) *ms = (float)(last->at - first->at);
    END
}
int cuMemcpyHtoDAsync_v2(char* target, const void* source, size_t size, Stream* stream) {
    pthread_mutex_lock(&lock);
    if (catch_in > 0 && --catch_in == 0) caught = 1;
    while (caught) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    BEGIN("cuMemcpyHtoDAsync_v2")
    REQUIRE(stream->alive && size) {
        queue(stream, (Op){.kind = COPY, .target = target, .source = source, .size = size});
        queued_bytes += size;
        if (queued_bytes > most_bytes) most_bytes = queued_bytes;
    }
    END
}
int cuGetErrorName(int code, const char** name) { *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER"; return SUCCESS; }
int cuGetErrorString(int code, const char** text) {
    *text = code == 700 ? "an illegal memory access was encountered" : "told by the driver";
    return SUCCESS;
}
