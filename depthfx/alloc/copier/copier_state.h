/* What a copier is: its jobs, the batches that are under way, the driver's part that it uses. */
#ifndef DEPTHFX_COPIER_STATE_H
#define DEPTHFX_COPIER_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;
enum { STREAM_NON_BLOCKING = 1, EVENT_BLOCKING_SYNC = 1, NOT_READY = 600 };

#define DRIVER_FUNCTIONS(X)                                                       \
    X(init, cuInit, (unsigned))                                                   \
    X(device_get, cuDeviceGet, (CUdevice*, int))                                  \
    X(context_retain, cuDevicePrimaryCtxRetain, (CUcontext*, CUdevice))           \
    X(context_release, cuDevicePrimaryCtxRelease_v2, (CUdevice))                  \
    X(context_push, cuCtxPushCurrent_v2, (CUcontext))                             \
    X(context_pop, cuCtxPopCurrent_v2, (CUcontext*))                              \
    X(capture_mode, cuThreadExchangeStreamCaptureMode, (int*))                    \
    X(stream_create, cuStreamCreate, (CUstream*, unsigned))                       \
    X(stream_destroy, cuStreamDestroy_v2, (CUstream))                             \
    X(stream_wait, cuStreamWaitEvent, (CUstream, CUevent, unsigned))              \
    X(stream_synchronize, cuStreamSynchronize, (CUstream))                        \
    X(event_create, cuEventCreate, (CUevent*, unsigned))                          \
    X(event_destroy, cuEventDestroy_v2, (CUevent))                                \
    X(event_record, cuEventRecord, (CUevent, CUstream))                           \
    X(event_synchronize, cuEventSynchronize, (CUevent))                           \
    X(event_query, cuEventQuery, (CUevent))                                       \
    X(event_elapsed, cuEventElapsedTime, (float*, CUevent, CUevent))              \
    X(copy, cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void*, size_t, CUstream))   \
    X(error_name, cuGetErrorName, (CUresult, const char**))                       \
    X(error_string, cuGetErrorString, (CUresult, const char**))

#include "../cuda_driver.h"
#include "copier_hooks.h"

#define WHY 400 /* bytes of a reason */

/* One unit to copy. It ends when no byte of it can be under way any more; until then its memory must live. */
typedef struct Job {
    struct Job* next; /* among the jobs in the order of their submission, then among those that ended */
    uint64_t id;
    char* target;
    const char* source;
    size_t bytes, chunk, issued; /* `issued`: taken by a batch */
    CUevent after;
    uint64_t batch;              /* number of the last batch with bytes of it; 0: none */
    int holds;                   /* pieces of it under way, and calls that look at it: it does not end before they let go */
    int in_hand, copied, failed; /* in_hand: the thread is handing bytes of it over */
    _Atomic int cancelled;
    char why[WHY];
} Job;

typedef struct {
    Job* job;
    size_t first, end; /* bytes handed over: [first, end) */
} Piece;

/* Chunks that were issued together, with one event behind them. Batch n uses slot n % most, so an event is reused once its batch landed. */
typedef struct {
    Piece* pieces;
    int num_pieces, num_chunks, has_event;
    int follows; /* it was queued while the batch before was under way, and waits for nothing else: their events time it */
    CUevent event;
} Batch;

typedef struct {
    pthread_mutex_t lock; /* over the book-keeping below; never held over a copy, a wait for the device or a hook */
    pthread_cond_t changed;
    pthread_t thread;
    pid_t process;
    CudaDriver driver;
    int queues; /* 0: copies on the host, at once, no driver */
    CUdevice device;
    CUcontext context;
    CUstream stream;
    Batch* batches;
    Piece* pieces;
    int most, num_flying; /* chunks that may be under way, and are */
    int flight, num_slow;    /* of `most`, how many may be under way now; how often that was halved */
    int run;                 /* batches since the queue was empty */
    double best;             /* nanoseconds a byte of the link by itself; 0: not known */
    uint64_t issued, landed; /* numbers of batches */
    uint64_t decided;        /* batches up to this one were issued before `flight` last changed */
    Job *jobs, *ended, **last_ended;
    int issuing, closing, thread_ended, joined, died;
    char why[WHY]; /* it died */
    int64_t copied_bytes, busy_ns, busy_since;
    Hooks hooks;
} Copier;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* 0 for success; else the driver's words about `call` in `why`. */
static int check(const CudaDriver* driver, CUresult result, const char* call, char* why) {
    const char *name = NULL, *text = NULL;
    if (result == CUDA_SUCCESS) return 0;
    if (driver->error_name(result, &name) != CUDA_SUCCESS || name == NULL) name = "an unknown code";
    if (driver->error_string(result, &text) != CUDA_SUCCESS || text == NULL) text = "no text";
    snprintf(why, WHY, "%s failed with %s: %s (%d)", call, name, text, result);
    return -1;
}

/* Book-keeping; the caller holds the lock. */

/* The next job with bytes that nobody has taken. */
static Job* next_job(Copier* copier) {
    for (Job* job = copier->jobs; job != NULL; job = job->next)
        if (!job->cancelled && !job->failed && job->issued < job->bytes) return job;
    return NULL;
}

static int is_idle(Copier* copier) {
    return !copier->issuing && copier->issued == copier->landed && next_job(copier) == NULL;
}

static void stop_clock(Copier* copier) {
    if (copier->busy_since == 0 || !is_idle(copier)) return;
    copier->busy_ns += now_ns() - copier->busy_since;
    copier->busy_since = 0;
}

/* Moves a job that has ended to those that are told of. */
static void settle(Copier* copier, Job* job) {
    if (job->holds || !(job->cancelled || job->failed || job->copied)) return;
    for (Job** at = &copier->jobs; *at != NULL; at = &(*at)->next)
        if (*at == job) {
            *at = job->next;
            break;
        }
    job->next = NULL;
    *copier->last_ended = job;
    copier->last_ended = &job->next;
}

static void fail_job(Job* job, const char* why) {
    if (job->cancelled || job->failed || job->copied) return;
    job->failed = 1;
    snprintf(job->why, WHY, "%s", why);
}

static void settle_all(Copier* copier) {
    for (Job *job = copier->jobs, *next; job != NULL; job = next) {
        next = job->next;
        settle(copier, job);
    }
    stop_clock(copier);
    pthread_cond_broadcast(&copier->changed);
}

#endif
