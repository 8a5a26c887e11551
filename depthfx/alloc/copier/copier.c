/* Copies from the host in the background: one thread, one stream, units one after another. No call of it touches the interpreter.
 *
 * Chunks are issued by cuMemcpyHtoDAsync on a stream of the copier's own, at most `flight` under way, half of them together with one event
 * behind them; between two batches the thread sleeps in that event until the device raises an interrupt. Without a device (ordinal -1)
 * the same loop copies on the host, one chunk at a time. A job ends (take tells of it) once no byte of it can be under way any more.
 * Calls may come from any thread; those that fail change nothing. A process forked from one with a copier has no thread for it. */
#define _GNU_SOURCE /* names of threads */
#include "copier_thread.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { OK = 0, DIED = -1, CLOSED = -2, NO_MEMORY = -3, FAILED = -4 };
enum { NONE, COPIED, CANCELLED, JOB_FAILED };

typedef struct {
    uint64_t id;
    int64_t state;
    char why[WHY];
} Report;

typedef struct {
    int64_t copied_bytes, busy_ns, idle, died, flight, num_slow;
} Stats;

static int is_forked(const Copier* copier) { return getpid() != copier->process; }

static struct timespec time_in(double seconds) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    int64_t ns = at.tv_nsec + (int64_t)(seconds * 1e9);
    return (struct timespec){at.tv_sec + (time_t)(ns / 1000000000), (long)(ns % 1000000000)};
}

static void make_lock(pthread_mutex_t* lock, pthread_cond_t* changed) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(lock, NULL);
    pthread_cond_init(changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

static int make_stream(Copier* copier, char* why) {
    CudaDriver* driver = &copier->driver;
    if (check(driver, driver->stream_create(&copier->stream, STREAM_NON_BLOCKING), "cuStreamCreate", why)) return -1;
    int failed = 0;
    for (int i = 0; !failed && i < copier->most; i++)
        failed = check(driver, driver->event_create(&copier->batches[i].event, EVENT_BLOCKING_SYNC), "cuEventCreate", why);
    return failed;
}

static int open_device(Copier* copier, const char* library, int ordinal, char* why) {
    CudaDriver* driver = &copier->driver;
    CUcontext popped;
    int mode = CAPTURE_MODE_RELAXED;
    if (load_driver(driver, library == NULL ? "libcuda.so.1" : library, why, WHY)) return -1;
    if (check(driver, driver->init(0), "cuInit", why)) return -1;
    if (check(driver, driver->device_get(&copier->device, ordinal), "cuDeviceGet", why)) return -1;
    if (check(driver, driver->context_retain(&copier->context, copier->device), "cuDevicePrimaryCtxRetain", why)) return -1;
    if (check(driver, driver->context_push(copier->context), "cuCtxPushCurrent", why)) {
        driver->context_release(copier->device);
        return -1;
    }
    driver->capture_mode(&mode);
    int failed = make_stream(copier, why);
    driver->capture_mode(&mode);
    if (failed) end_device(copier);
    else driver->context_pop(&popped);
    return failed;
}

/* All signals are left to the interpreter's threads. */
static int start(Copier* copier, char* why) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&copier->thread, NULL, work, copier);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) snprintf(why, WHY, "no thread can be started: %s", strerror(failed));
    else pthread_setname_np(copier->thread, "depthfx-restore");
    return failed ? -1 : 0;
}

static void free_copier(Copier* copier) {
    if (copier == NULL) return;
    for (Job *job = copier->ended, *next; job != NULL; job = next) {
        next = job->next;
        free(job);
    }
    free(copier->batches);
    free(copier->pieces);
    free(copier);
}

/* A copier for the device with this ordinal (-1: the host), with up to `most` chunks under way; NULL, and the reason in `why[400]`. */
EXPORT Copier* depthfx_copier_open(const char* library, int ordinal, int most, char* why) {
    Copier* copier = calloc(1, sizeof *copier);
    size_t half = ((size_t)most + 1) / 2;
    if (copier != NULL) {
        copier->batches = calloc((size_t)most, sizeof *copier->batches);
        copier->pieces = calloc((size_t)most * half, sizeof *copier->pieces);
    }
    if (copier == NULL || copier->batches == NULL || copier->pieces == NULL) {
        snprintf(why, WHY, "no host memory for %d chunks in flight", most);
        free_copier(copier);
        return NULL;
    }
    for (int i = 0; i < most; i++) copier->batches[i].pieces = copier->pieces + (size_t)i * half;
    make_lock(&copier->lock, &copier->changed);
    make_lock(&copier->hooks.lock, &copier->hooks.changed);
    copier->last_ended = &copier->ended;
    copier->most = copier->flight = most;
    copier->process = getpid();
    copier->queues = ordinal >= 0;
    if (copier->queues && open_device(copier, library, ordinal, why)) {
        free_copier(copier);
        return NULL;
    }
    if (start(copier, why) == 0) return copier;
    if (copier->queues && copier->driver.context_push(copier->context) == CUDA_SUCCESS) end_device(copier);
    free_copier(copier);
    return NULL;
}

/* Copies [source, + bytes) to target in pieces of `chunk`, behind all jobs before; the first piece waits for the event `after` (or 0). */
EXPORT int depthfx_copier_submit(Copier* copier, uint64_t id, char* target, const char* source, size_t bytes, size_t chunk, CUevent after) {
    if (is_forked(copier)) return DIED;
    Job* job = malloc(sizeof *job);
    if (job == NULL) return NO_MEMORY;
    memset(job, 0, sizeof *job);
    job->id = id;
    job->target = target;
    job->source = source;
    job->bytes = bytes;
    job->chunk = chunk;
    job->after = after;
    pthread_mutex_lock(&copier->lock);
    int refused = copier->died ? DIED : copier->closing ? CLOSED : OK;
    if (refused == OK) {
        Job** last = &copier->jobs;
        while (*last != NULL) last = &(*last)->next;
        *last = job;
        if (copier->busy_since == 0) copier->busy_since = now_ns();
        pthread_cond_broadcast(&copier->changed);
    }
    pthread_mutex_unlock(&copier->lock);
    if (refused != OK) free(job);
    return refused;
}

/* Nothing more of a job is issued. Returns the number of the batch with its last chunk, 0 if no chunk of it is under way. Waits for no
 * device, but until the chunk that is being handed over is handed over. */
EXPORT uint64_t depthfx_copier_cancel(Copier* copier, uint64_t id) {
    if (is_forked(copier)) return 0;
    uint64_t batch = 0;
    pthread_mutex_lock(&copier->lock);
    Job* job = copier->jobs;
    while (job != NULL && job->id != id) job = job->next;
    if (job != NULL) {
        job->cancelled = 1;
        job->holds++;
        while (job->in_hand) pthread_cond_wait(&copier->changed, &copier->lock);
        job->holds--;
        if (copier->queues && job->batch > copier->landed) batch = job->batch;
        settle_all(copier);
    }
    pthread_mutex_unlock(&copier->lock);
    return batch;
}

/* The next job that ended, in their order, each once; its state, NONE if there is none. */
EXPORT int depthfx_copier_take(Copier* copier, Report* report) {
    if (is_forked(copier)) return NONE;
    pthread_mutex_lock(&copier->lock);
    Job* job = copier->ended;
    if (job != NULL) {
        copier->ended = job->next;
        if (copier->ended == NULL) copier->last_ended = &copier->ended;
    }
    pthread_mutex_unlock(&copier->lock);
    if (job == NULL) return NONE;
    report->id = job->id;
    report->state = job->cancelled ? CANCELLED : job->failed ? JOB_FAILED : COPIED;
    memcpy(report->why, job->why, WHY);
    free(job);
    return (int)report->state;
}

/* Counts at this moment. */
EXPORT void depthfx_copier_stats(Copier* copier, Stats* stats) {
    if (is_forked(copier)) {
        *stats = (Stats){copier->copied_bytes, copier->busy_ns, 1, 1, copier->flight, copier->num_slow};
        return;
    }
    pthread_mutex_lock(&copier->lock);
    int64_t busy = copier->busy_since == 0 ? 0 : now_ns() - copier->busy_since;
    *stats = (Stats){copier->copied_bytes, copier->busy_ns + busy, is_idle(copier), copier->died, copier->flight, copier->num_slow};
    pthread_mutex_unlock(&copier->lock);
}

/* Why the thread ended of itself. */
EXPORT const char* depthfx_copier_why(Copier* copier) {
    return is_forked(copier) ? "this process was forked, and its thread stayed in the other one" : copier->why;
}

/* Waits until nothing is waiting or under way; 1 if so, 0 after `seconds`. */
EXPORT int depthfx_copier_wait_idle(Copier* copier, double seconds) {
    struct timespec until = time_in(seconds);
    if (is_forked(copier)) return 1;
    pthread_mutex_lock(&copier->lock);
    while (!is_idle(copier) && pthread_cond_timedwait(&copier->changed, &copier->lock, &until) != ETIMEDOUT) {}
    int idle = is_idle(copier);
    pthread_mutex_unlock(&copier->lock);
    return idle;
}

/* Waits until the host has seen the end of a batch; 1 if so, 0 after `seconds`. */
EXPORT int depthfx_copier_wait_batch(Copier* copier, uint64_t batch, double seconds) {
    struct timespec until = time_in(seconds);
    if (is_forked(copier)) return 1;
    pthread_mutex_lock(&copier->lock);
    while (copier->landed < batch && pthread_cond_timedwait(&copier->changed, &copier->lock, &until) != ETIMEDOUT) {}
    int landed = copier->landed >= batch;
    pthread_mutex_unlock(&copier->lock);
    return landed;
}

/* What is queued on `stream` from now on waits for a batch, on the device. The lock keeps the batch's event from being used anew. */
EXPORT int depthfx_copier_stream_wait(Copier* copier, uint64_t batch, CUstream stream, char* why) {
    CUcontext popped;
    if (is_forked(copier)) return OK;
    pthread_mutex_lock(&copier->lock);
    Batch* found = copier->batches + batch % (uint64_t)copier->most;
    int failed = 0;
    if (batch > copier->landed && found->has_event) {
        /* Stream 0 is the default stream of the context that is current. */
        failed = check(&copier->driver, copier->driver.context_push(copier->context), "cuCtxPushCurrent", why);
        if (!failed) {
            failed = check(&copier->driver, copier->driver.stream_wait(stream, found->event, 0), "cuStreamWaitEvent", why);
            copier->driver.context_pop(&popped);
        }
    }
    pthread_mutex_unlock(&copier->lock);
    return failed ? FAILED : OK;
}

/* Nothing more is issued, what is under way ends, the thread ends; 1 if so, 0 after `seconds`. May be called again. */
EXPORT int depthfx_copier_close(Copier* copier, double seconds) {
    struct timespec until = time_in(seconds);
    if (is_forked(copier)) return 1;
    pthread_mutex_lock(&copier->lock);
    copier->closing = 1;
    for (Job* job = copier->jobs; job != NULL; job = job->next)
        if (job->issued < job->bytes || job->in_hand) job->cancelled = 1;
    settle_all(copier);
    while (!copier->thread_ended && pthread_cond_timedwait(&copier->changed, &copier->lock, &until) != ETIMEDOUT) {}
    int ended = copier->thread_ended, joins = ended && !copier->joined;
    copier->joined |= joins;
    pthread_mutex_unlock(&copier->lock);
    if (joins) pthread_join(copier->thread, NULL);
    return ended;
}

/* Gives back the copier itself, if it is closed; no call of it may follow. */
EXPORT void depthfx_copier_free(Copier* copier) {
    if (!is_forked(copier) && copier->joined) free_copier(copier);
}

/* For tests: each place is passed after a random delay for a share of the arrivals, and fails for another; seed 0: neither. */
EXPORT void depthfx_copier_disturb(Copier* copier, uint64_t seed, double delay_share, unsigned most_us, double fail_share) {
    Hooks* hooks = &copier->hooks;
    pthread_mutex_lock(&hooks->lock);
    hooks->random = seed * 0x9E3779B97F4A7C15u;
    hooks->delay_share = delay_share;
    hooks->most_us = most_us < 1000000 ? most_us : 999999;
    hooks->fail_share = fail_share;
    pthread_mutex_unlock(&hooks->lock);
}

/* For tests: `count` arrivals at a place fail, from the nth on (0: none); with `ends` the thread ends. */
EXPORT void depthfx_copier_fail(Copier* copier, int place, long nth, long count, int ends) {
    Hooks* hooks = &copier->hooks;
    pthread_mutex_lock(&hooks->lock);
    hooks->fail_place = place;
    hooks->fail_in = nth;
    hooks->num_failures = count;
    hooks->ends = ends;
    pthread_mutex_unlock(&hooks->lock);
}

/* For tests: the thread stops at the nth arrival at a place (0: not at all), until this is called again. */
EXPORT void depthfx_copier_hold(Copier* copier, int place, long nth) {
    Hooks* hooks = &copier->hooks;
    pthread_mutex_lock(&hooks->lock);
    hooks->hold_place = place;
    hooks->hold_in = nth;
    hooks->held = 0;
    pthread_cond_broadcast(&hooks->changed);
    pthread_mutex_unlock(&hooks->lock);
}

/* For tests: whether the thread is stopped, waiting up to `seconds` for it. */
EXPORT int depthfx_copier_held(Copier* copier, double seconds) {
    Hooks* hooks = &copier->hooks;
    struct timespec until = time_in(seconds);
    pthread_mutex_lock(&hooks->lock);
    while (!hooks->held && pthread_cond_timedwait(&hooks->changed, &hooks->lock, &until) != ETIMEDOUT) {}
    int held = hooks->held;
    pthread_mutex_unlock(&hooks->lock);
    return held;
}
