{{/* Name of the chart's objects. */}}
{{- define "kubelora.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Labels that select the operator's pods; they never change. */}}
{{- define "kubelora.selector" -}}
app.kubernetes.io/name: kubelora-operator
app.kubernetes.io/instance: {{ .Release.Name | trunc 63 }}
{{- end }}

{{/* Labels of every object. */}}
{{- define "kubelora.labels" -}}
{{ include "kubelora.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kubelora
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* A complete image reference from (dict "image" VALUES "default" TAG). */}}
{{- define "kubelora.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .default .image.tag }}
{{- end -}}
{{- end }}

{{- define "kubelora.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "kubelora.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{/* What the operator does in every namespace with jobs: WORK in kubelora_operator/kube/rbac.py. */}}
{{- define "kubelora.workRules" -}}
- apiGroups: [kubelora.dev]
  resources: [loratrainingjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [kubelora.dev]
  resources: [loratrainingjobs/status]
  verbs: [update]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [get, create, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch, list]
{{- end }}

{{/* Seconds of a duration such as 1h30m, as a number. */}}
{{- define "kubelora.seconds" -}}
{{- $units := dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 "d" 86400.0 -}}
{{- $sum := 0.0 -}}
{{- range regexFindAll "[0-9]+(ms|s|m|h|d)" . -1 -}}
{{- $sum = addf $sum (mulf (regexFind "[0-9]+" . | float64) (get $units (regexFind "[a-z]+" .))) -}}
{{- end -}}
{{- $sum -}}
{{- end }}

{{/* Refuses values of monitoring with which no rule could work; each sentence says what to set. */}}
{{- define "kubelora.checkMonitoring" -}}
{{- $rules := .Values.monitoring.rules -}}
{{- $interval := include "kubelora.seconds" .Values.monitoring.podMonitor.interval | float64 -}}
{{- if and (not .Values.monitoring.podMonitor.enabled) (not $rules.scrapedElsewhere) -}}
{{- fail "monitoring.rules.enabled needs monitoring.podMonitor.enabled=true: without scrapes KubeloraOperatorAbsent fires and no other alert can. If Prometheus scrapes operator and pods by a configuration of your own with the labels of templates/podmonitor.yaml (job_namespace, name, attempt; release), set monitoring.rules.scrapedElsewhere=true" -}}
{{- end -}}
{{- if hasKey $rules.alertLabels "severity" -}}
{{- fail "monitoring.rules.alertLabels.severity would give every alert one severity: set that of single alerts in monitoring.rules.severities, such as KubeloraJobFailed: critical" -}}
{{- end -}}
{{- if or (lt $interval 1.0) (gt $interval 120.0) -}}
{{- fail (printf "monitoring.podMonitor.interval is %s: set 1s to 2m. Prometheus forgets a sample after 5m, and a median needs two in a row" .Values.monitoring.podMonitor.interval) -}}
{{- end -}}
{{- if lt (include "kubelora.seconds" $rules.window | float64) (mulf 6.0 $interval) -}}
{{- fail (printf "monitoring.rules.window is %s: set at least six times monitoring.podMonitor.interval (%s), because a median needs five steps, each seen by a scrape of its own" $rules.window .Values.monitoring.podMonitor.interval) -}}
{{- end -}}
{{- if lt (float64 $rules.stalledAfterSeconds) (mulf 4.0 $interval) -}}
{{- fail (printf "monitoring.rules.stalledAfterSeconds is %d: set at least four times monitoring.podMonitor.interval (%s), or every pause between two scrapes is a stall" (int $rules.stalledAfterSeconds) .Values.monitoring.podMonitor.interval) -}}
{{- end -}}
{{- end }}

{{/* A file whose $(...) are replaced by the chart's values, from (dict "file" PATH "root" $). */}}
{{- define "kubelora.fillIn" -}}
{{- $root := .root -}}
{{- $rules := $root.Values.monitoring.rules -}}
{{- $text := $root.Files.Get .file -}}
{{- range $key, $value := dict
      "window" $rules.window
      "for" $rules.for
      "interval" $root.Values.monitoring.podMonitor.interval
      "stalledAfterSeconds" (int $rules.stalledAfterSeconds | toString)
      "operatorAbsentFor" $rules.operatorAbsentFor
      "unseenFor" $rules.unseenFor
      "keepFiringFor" $rules.keepFiringFor
      "notStartingAfterSeconds" (int $rules.notStartingAfterSeconds | toString)
      "queuedAfterSeconds" (int $rules.queuedAfterSeconds | toString)
      "silentAfterSeconds" (int $rules.silentAfterSeconds | toString)
      "runbookUrlBase" ($rules.runbookUrlBase | replace "{version}" $root.Chart.AppVersion | trimSuffix "/")
      "datasourceUid" $root.Values.monitoring.grafana.datasourceUid
      "grafanaUrl" (trimSuffix "/" $root.Values.monitoring.grafana.url)
      "release" ($root.Release.Name | trunc 63)
      "namespace" $root.Release.Namespace }}
{{- $text = replace (printf "$(%s)" $key) $value $text }}
{{- end }}
{{- $text -}}
{{- end }}
